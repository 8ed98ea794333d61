"""Nested structures are taken apart and put together again."""

import dataclasses
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat import nest

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Layer:
    kernel: object
    bias: object = None


@dataclasses.dataclass(frozen=True)
class Checked:
    value: int

    def __post_init__(self):
        if not isinstance(self.value, int):
            raise TypeError("the value is an int")


@dataclasses.dataclass(frozen=True)
class Description:
    _mpistrat_leaf = True
    shape: tuple


@dataclasses.dataclass
class Derived(Layer):
    more: object = 0


@pytest.mark.parametrize("value", [[], (), {}, None, [1], Point(1, 2), Layer(1), Checked(1), OrderedDict()])
def test_structures(value):
    assert nest.is_nested(value)


@pytest.mark.parametrize(
    "value", [1, 1.0, "ab", b"ab", np.ones(2), {1, 2}, range(3), iter([1]), Description((1,)), Layer, len, object()]
)
def test_leaves(value):
    assert not nest.is_nested(value)
    leaves, rebuild = nest.flatten(value)
    assert leaves == [value] if not isinstance(value, np.ndarray) else leaves[0] is value
    assert rebuild(["new"]) == "new"
    assert nest.map_structure(lambda x: [x], value) == [value] if not isinstance(value, np.ndarray) else True


@pytest.mark.parametrize(
    ("value", "leaves"),
    [
        ([1, [2, (3, None)], {"b": 5, "a": 4}], [1, 2, 3, 4, 5]),
        (Point([1], {"k": 2}), [1, 2]),
        (Layer(1, Layer(2, 3)), [1, 2, 3]),
        ([Checked(4)], [4]),
        (Derived(1, 2, [3]), [1, 2, 3]),
        ([None, None], []),
        ((Description((1, 2)), 1), [Description((1, 2)), 1]),
        (OrderedDict(b=1, a=2), [1, 2]),
        ({1: "a", 2: "b"}, ["a", "b"]),
        (("ab", b"cd"), ["ab", b"cd"]),
    ],
)
def test_flatten(value, leaves):
    found, rebuild = nest.flatten(value)
    assert found == leaves
    again = rebuild(list(found))
    assert again == value
    assert type(again) is type(value)
    assert rebuild([object() for _ in found]) is not None


def test_dicts_keep_their_order():
    for value in ({"b": 1, "a": 2}, OrderedDict(b=1, a=2), {"z": {"y": 1, "x": 2}, "a": 3}):
        assert list(nest.map_structure(str, value)) == list(value)
        leaves, rebuild = nest.flatten(value)
        assert list(rebuild(leaves)) == list(value)
    assert list(nest.map_structure(str, {"z": {"y": 1, "x": 2}})["z"]) == ["y", "x"]
    made = nest.map_structure(str, defaultdict(list, b=1))
    assert made == {"b": "1"}
    assert made["new"] == []


def test_equal_keys_give_equal_leaves_in_any_order():
    """So that ranks that filled a dict in different order do not add up different things."""
    for one, other in [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({2: 1, 10: 2}, {10: 2, 2: 1}),
        ({(1, "a"): 1, (0, "b"): 2}, {(0, "b"): 2, (1, "a"): 1}),
        ({1: 1, "a": 2}, {"a": 2, 1: 1}),
    ]:
        assert nest.flatten(one)[0] == nest.flatten(other)[0]


def test_dataclasses_are_rebuilt_without_their_constructor():
    rebuilt = nest.map_structure(str, Checked(1))
    assert isinstance(rebuilt, Checked)
    assert rebuilt.value == "1"
    assert dataclasses.asdict(nest.map_structure(lambda x: x + 1, Layer(1, [2]))) == {"kernel": 2, "bias": [3]}


class Settings(dict):
    pass


class Ordered(OrderedDict):
    pass


class Layers(list):
    pass


class Pair(tuple):
    pass


@pytest.mark.parametrize(
    "value",
    [
        Settings(b=1, a=[2, None]),
        Layers([1, Settings(a=2), {"deep": Layers([3])}]),
        Pair((1, [Pair((2, 3))])),
        Counter({"b": 1, "a": 2}),
        Ordered([("b", 1), ("a", 2)]),
        [Settings({1: 2, "x": 3})],
        Point(Layers([1]), Settings(a=2)),
    ],
    ids=str,
)
def test_classes_derived_from_containers(value):
    leaves, rebuild = nest.flatten(value)
    assert all(isinstance(leaf, int) for leaf in leaves)
    again = rebuild(leaves)
    assert again == value
    assert type(again) is type(value)
    assert repr(nest.map_structure(lambda x: x, value)) == repr(again)
    assert nest.take_apart(value).form == nest.take_apart(again).form


def test_derived_dicts_have_one_order():
    one, other = Settings({"b": 2, "a": 1, 3: 0}), Settings({3: 0, "a": 1, "b": 2})
    assert nest.flatten(one)[0] == nest.flatten(other)[0]
    assert nest.take_apart(one).form == nest.take_apart(other).form


def test_several_structures():
    def add(x, y):
        return x + y

    assert nest.map_structure(add, [1, {"a": 2}], [10, {"a": 20}]) == [11, {"a": 22}]
    assert nest.map_structure(add, 1, 2) == 3
    assert nest.map_structure(add, {"a": 1, "b": 2}, {"b": 20, "a": 10}) == {"a": 11, "b": 22}
    for one, other in [
        ([1, 2], [1]),
        ([1], (1,)),
        ({"a": 1}, {"b": 1}),
        ([1, None], [1, 2]),
        ([[1]], [1, 2]),
        (Layer(1), Derived(1)),
        (1, [1, 2]),
        ([1], [[1]]),
        ([1, 2], 1),
    ]:
        with pytest.raises(ValueError):
            nest.map_structure(add, one, other)


def test_structures_are_not_changed():
    value = {"a": [1, 2], "b": Layer(3)}
    leaves, rebuild = nest.flatten(value)
    leaves.append(9)
    made = rebuild([7, 8, 9])
    assert made == {"a": [7, 8], "b": Layer(9)}
    assert value == {"a": [1, 2], "b": Layer(3)}
    flat = [1, 2]
    leaves, rebuild = nest.flatten(flat)
    leaves[0] = 5
    assert flat == [1, 2]
    for wrong in ([1], [1, 2, 3]):
        with pytest.raises(ValueError):
            nest.flatten({"a": 1, "b": [2]})[1](wrong)


def test_errors_of_the_function_pass():
    for value in (1, [1], {"a": [1]}):
        with pytest.raises(ZeroDivisionError):
            nest.map_structure(lambda x: x / 0, value)


trees = st.recursive(
    st.integers() | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.builds(Point, inner, inner)
        | st.builds(Layer, inner, inner)
    ),
    max_leaves=20,
)


@pytest.mark.full
@settings(max_examples=200, derandomize=True, database=None, deadline=None)
@given(trees)
def test_any_structure_comes_back(tree):
    leaves, rebuild = nest.flatten(tree)
    assert all(isinstance(leaf, int) for leaf in leaves)
    assert rebuild(leaves) == tree
    assert nest.map_structure(lambda x: x, tree) == tree
    doubled = nest.flatten(nest.map_structure(lambda x, y: x + y, tree, tree))[0]
    assert doubled == [2 * leaf for leaf in leaves]
