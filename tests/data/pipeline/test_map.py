"""Tests of map functions, structures and element specs."""

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest

from mpistrat.data import ArraySpec, Dataset


class Pair(NamedTuple):
    a: object
    b: object


@dataclasses.dataclass
class Sample:
    x: object
    y: object


def test_structures_go_through(plain):
    x, y = np.arange(6.0).reshape(3, 2), np.arange(3)
    for tree in ((x, y), {"x": x, "y": {"z": y}}, Pair(x, (y,)), Sample(x, y), (x, None)):
        dataset = Dataset.from_arrays(tree)
        first = next(iter(dataset))
        batch = next(iter(dataset.batch(3)))
        assert type(first) is type(batch) is type(tree)
        assert plain(batch) == plain(tree)
    assert Dataset.from_tensor_slices([[1, 2], [3, 4]]).element_spec == ArraySpec((2,), "int64")


def test_list_is_one_array_also_inside_a_tuple():
    dataset = Dataset.from_arrays(([1, 2, 3], [[1.0], [2.0], [3.0]]))
    assert dataset.element_spec == (ArraySpec((), "int64"), ArraySpec((1,), "float64"))


def test_batches_are_copies():
    x = np.arange(4)
    for batch in Dataset.from_arrays(x).batch(2):
        batch += 10
    assert x.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (3, "scalar"),
        ((np.zeros(2), np.zeros(3)), "array 0 has 2 rows and array 1 has 3"),
        ((), "no array"),
        ([[1], [2, 3]], "use a tuple"),
    ],
)
def test_arrays_that_make_no_dataset(tree, text):
    with pytest.raises(ValueError, match=text):
        Dataset.from_arrays(tree)


def test_tuples_are_spread_other_structures_are_not(plain):
    pairs = Dataset.from_arrays(([1, 2], [3, 4]))
    assert plain(list(pairs.map(lambda a, b: a * b))) == [3, 8]
    assert plain(list(pairs.batch(2).map(lambda a, b: {"s": a + b}))) == [{"s": [4, 6]}]
    assert plain(list(Dataset.from_arrays({"a": [1, 2]}).map(lambda row: (row["a"], 7)).batch(2))) == [([1, 2], [7, 7])]
    assert plain(list(Dataset.from_arrays(Pair([1], [2])).map(lambda pair: pair.a + pair.b))) == [3]


def test_map_per_element_and_per_batch_see_what_they_should():
    seen = []
    dataset = Dataset.from_arrays(np.zeros((4, 3)))
    list(dataset.map(lambda x: seen.append(x.shape) or x).batch(2).map(lambda x: seen.append(x.shape) or x))
    assert seen == [(3,), (3,), (2, 3)] * 2


def test_elements_that_cannot_be_stacked():
    ragged = Dataset.range(3).map(lambda i: np.zeros(i)).batch(3)
    with pytest.raises(ValueError, match=r"equal shapes, but map\(\) returned \(0,\) for one and \(1,\)"):
        list(ragged)
    assert [x.shape for x in Dataset.range(3).map(lambda i: np.zeros(i))] == [(0,), (1,), (2,)]
    with pytest.raises(ValueError, match="returns its result"):
        list(Dataset.range(3).map(lambda i: None).batch(3))


def test_element_spec():
    dataset = Dataset.from_arrays({"x": np.zeros((5, 2), "f4")})
    assert dataset.element_spec == {"x": ArraySpec((2,), "f4")}
    assert dataset.batch(2).element_spec == {"x": ArraySpec((None, 2), "f4")}
    assert dataset.batch(2, drop_remainder=True).element_spec == {"x": ArraySpec((2, 2), "f4")}
    summed = dataset.map(lambda row: row["x"].sum())
    assert summed.element_spec == ArraySpec((), "f4")
    assert summed.batch(3).element_spec == ArraySpec((None,), "f4")
    per_batch = dataset.batch(3).map(lambda row: (row["x"].T, row["x"] > 0, row["x"].shape))
    spec = per_batch.element_spec
    assert spec[:2] == (ArraySpec((2, None), "f4"), ArraySpec((None, 2), bool))
    assert dataset.batch(3, True).map(lambda row: row["x"] + 1).element_spec == ArraySpec((3, 2), "f4")


def test_element_spec_of_nothing():
    dataset = Dataset.from_arrays(np.zeros((0, 2), "i4"))
    assert dataset.map(lambda x: x * 0.5).batch(2).element_spec == ArraySpec((None, 2), "f8")
    assert list(dataset.batch(2)) == []


def test_array_spec():
    spec = ArraySpec([None, 2], "float32", name="x")
    assert repr(spec) == "ArraySpec(shape=(None, 2), dtype=float32, name='x')"
    assert spec == ArraySpec((None, 2), np.float32, "x")
    assert spec != ArraySpec((None, 2), np.float32)
    assert hash(spec) == hash(ArraySpec((None, 2), np.float32, "x"))
    assert spec.is_compatible_with(np.zeros((7, 2), "f4"))
    assert not spec.is_compatible_with(np.zeros((7, 3), "f4"))
    assert not spec.is_compatible_with(np.zeros((7, 2)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.shape = ()
    with pytest.raises(ValueError, match="negative"):
        ArraySpec((-1,), int)


@pytest.mark.parametrize(
    ("there", "here"), [(">f8", "f8"), ([("v", ">i2", (2,))], [("v", "i2", (2,))]), ("O", "O"), ("T", "T")]
)
def test_byte_order_becomes_native(there, here):
    if there == "T" and not hasattr(np.dtypes, "StringDType"):
        pytest.skip("this NumPy has no strings of any length")
    values = np.arange(3).astype("U1" if there == "T" else "i2").astype(there)
    (batch,) = Dataset.from_arrays(values).batch(3)
    assert batch.dtype == np.dtype(here)
    assert str(batch.tolist()) == str(values.astype(here).tolist())
