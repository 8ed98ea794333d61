"""Ranks that give structures which differ raise, all of them, and are in step afterwards; equal ones are combined.

Every rank draws the same two structures and gives one of them: the odd rank the second, the others the first.
"""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import layouts, on_nodes
from mpi4py import MPI
from selection import core

import mpistrat
from mpistrat.collectives import CollectiveAllReduce
from mpistrat.runtime.agreement.operation import MismatchError
from mpistrat.training import load, save, save_async

SIZE, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The description of a leaf, equal on all ranks that have it."""

    kind: str  # array, rows, mirrored
    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass
class Pair:
    first: object
    second: object


class OneByOne(CollectiveAllReduce):
    """Ops of a program's own, which go through the hooks one by one."""

    def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        return [self.reduce_implementation(reduce_op, *pair, options) for pair in value_destination_pairs]


# --- structures and what becomes of them ---------------------------------------------------------------


def build(tree, make, number=None):
    """A structure of what ``make(leaf, number)`` returns. Dicts are filled in another order by odd ranks."""
    number = iter(range(1000)) if number is None else number
    if isinstance(tree, Leaf):
        return make(tree, next(number))
    if isinstance(tree, dict):
        made = {key: build(tree[key], make, number) for key in sorted(tree)}
        return {key: made[key] for key in sorted(tree, reverse=bool(RANK % 2))}
    if isinstance(tree, (list, tuple)):
        return type(tree)(build(each, make, number) for each in tree)
    if isinstance(tree, Pair):
        return Pair(build(tree.first, make, number), build(tree.second, make, number))
    return None


def leaves_of(tree):
    found = []
    build(tree, lambda leaf, _: found.append(leaf))
    return found


def same(got, wanted):
    assert type(got) is type(wanted) or not isinstance(wanted, (dict, list, tuple, Pair, type(None)))
    if isinstance(wanted, dict):
        assert list(got) == list(wanted)
        got, wanted = list(got.values()), list(wanted.values())
    if isinstance(wanted, Pair):
        got, wanted = [got.first, got.second], [wanted.first, wanted.second]
    if isinstance(wanted, (list, tuple)):
        for one, other in zip(got, wanted, strict=True):
            same(one, other)
    elif wanted is not None:
        got = got.to_dense() if isinstance(got, mpistrat.IndexedSlices) else np.asarray(got)
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


def value_of(leaf, number, rank):
    """What rank ``rank`` gives, as an array."""
    base = np.arange(np.prod(leaf.shape, dtype=int), dtype=leaf.dtype).reshape(leaf.shape) + 10 * number
    return base if leaf.kind == "mirrored" else base + np.asarray(rank, leaf.dtype)


def given_by(rank):
    def make(leaf, number):
        value = value_of(leaf, number, rank)
        if leaf.kind == "rows":
            return mpistrat.IndexedSlices(value, np.arange(len(value)), value.shape)
        return mpistrat.Mirrored((value,)) if leaf.kind == "mirrored" else value

    return make


def values_of(leaves, number):
    """What each rank gives; ``leaves`` are the descriptions of one leaf by rank."""
    return [value_of(leaf, number, rank) for rank, leaf in enumerate(leaves)]


def reduced(op):
    def wanted(leaves, number):
        if leaves[RANK].kind == "mirrored":
            return value_of(leaves[RANK], number, RANK)
        total = sum(values_of(leaves, number))
        return np.asarray(total / SIZE if op == "MEAN" else total)

    return wanted


def reduced_over_axis(op):
    def wanted(leaves, number):
        mirrored = leaves[RANK].kind == "mirrored"
        rows = value_of(leaves[RANK], number, RANK) if mirrored else gathered(leaves, number)
        return np.asarray(rows.mean(0) if op == "MEAN" else rows.sum(0))

    return wanted


def gathered(leaves, number):
    return np.concatenate(values_of(leaves, number))


def my_rows(op):
    return lambda leaves, number: np.array_split(reduced(op)(leaves, number), SIZE)[RANK]


# --- the calls -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Call:
    """A public call that takes a structure.

    It takes leaves of some ``kinds`` and ``refuses`` others with one of ``errors``.
    """

    make: Callable[[Any, str, Any], Any]
    wanted: Callable[[str], Callable[[tuple[Leaf, ...], int], Any]]
    kinds: tuple[str, ...]
    refuses: tuple[str, ...] = ()
    errors: type[Exception] | tuple[type[Exception], ...] = ()
    form: str = "any"  # or "list", "leaf"
    one_node: bool = False


def in_replica(method, *more):
    def make(strategy, op, value):
        first = () if method == "all_gather" else (op,)
        return strategy.run(lambda: getattr(mpistrat.get_replica_context(), method)(*first, value, *more))

    return make


def by_ops(kind):
    def make(strategy, op, value):
        return mpistrat.MirroredStrategy(cross_device_ops=kind(), comm=strategy.comm).reduce(op, value, axis=None)

    return make


def batch_by_ops(kind):
    def make(strategy, op, value):
        ops = kind()
        mpistrat.MirroredStrategy(cross_device_ops=ops, comm=strategy.comm)
        return [local(each) for each in ops.batch_reduce(op, [(each, "cpu:0") for each in value])]

    return make


def by_v1(strategy, op, value):
    return mpistrat.compat.v1.MirroredStrategy(comm=strategy.comm).reduce(op, value)


def local(value):
    return value.values[0]


CALLS = {
    "reduce": Call(
        lambda strategy, op, value: strategy.reduce(op, value, axis=None), reduced, ("array", "rows", "mirrored")
    ),
    "reduce, version 1": Call(by_v1, reduced, ("array", "rows", "mirrored"), one_node=True),
    "reduce, hierarchical": Call(by_ops(mpistrat.HierarchicalCopyAllReduce), reduced, ("array",), one_node=True),
    "reduce, to one device": Call(
        by_ops(mpistrat.ReductionToOneDevice), reduced, ("array", "rows", "mirrored"), one_node=True
    ),
    "reduce, own ops": Call(by_ops(OneByOne), reduced, ("array", "rows"), one_node=True),
    "reduce over an axis": Call(
        lambda strategy, op, value: strategy.reduce(op, value, axis=0),
        reduced_over_axis,
        ("array", "mirrored"),
        ("rows",),
        TypeError,
        form="leaf",
    ),
    "all_reduce": Call(in_replica("all_reduce"), reduced, ("array", "rows")),
    "all_reduce_async": Call(
        lambda strategy, op, value: in_replica("experimental_all_reduce_async")(strategy, op, value).wait(),
        reduced,
        ("array",),
        ("rows",),
        TypeError,
    ),
    "reduce_scatter": Call(in_replica("experimental_reduce_scatter"), my_rows, ("array",), ("rows",), TypeError),
    "gather": Call(
        lambda strategy, op, value: strategy.gather(value, axis=0),
        lambda op: gathered,
        ("array",),
        ("rows",),
        NotImplementedError,
    ),
    "all_gather": Call(in_replica("all_gather", 0), lambda op: gathered, ("array",), ("rows",), NotImplementedError),
    "reduce_to": Call(
        lambda strategy, op, value: local(strategy.extended.reduce_to(op, value, "cpu:0")),
        reduced,
        ("array", "rows", "mirrored"),
        form="leaf",
    ),
    "batch_reduce_to": Call(
        lambda strategy, op, value: [
            local(each) for each in strategy.extended.batch_reduce_to(op, [(each, "cpu:0") for each in value])
        ],
        reduced,
        ("array", "rows", "mirrored"),
        form="list",
    ),
    "batch_reduce, to one device": Call(
        batch_by_ops(mpistrat.ReductionToOneDevice), reduced, ("array", "rows", "mirrored"), form="list", one_node=True
    ),
    "batch_reduce, own ops": Call(batch_by_ops(OneByOne), reduced, ("array",), form="list", one_node=True),
    "broadcast_to": Call(
        lambda strategy, op, value: local(strategy.extended.broadcast_to(value, "cpu:0")),
        lambda op: lambda leaves, number: value_of(leaves[0], number, 0),
        ("array",),
        ("rows",),
        TypeError,
        form="leaf",
    ),
    "buffers_like": Call(
        lambda strategy, op, value: strategy.experimental_buffers_like(value),
        lambda op: lambda leaves, number: np.zeros(leaves[RANK].shape),
        ("array",),
    ),
}

# --- pairs of structures -------------------------------------------------------------------------------

SHAPES = [(1,), (3,), (3, 2), (2, 3), (40,)]
leaves = st.builds(
    Leaf,
    st.sampled_from(["array", "array", "array", "rows", "mirrored"]),
    st.sampled_from(["float64", "float64", "float32"]),
    st.sampled_from(SHAPES),
)
trees = st.recursive(
    leaves | st.none(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=6,
)


def changed(tree, rng):
    """A structure that is another one, but not by much."""
    if isinstance(tree, (list, tuple)) and tree and rng.random() < 0.6:
        i = rng.randrange(len(tree))
        return type(tree)([*tree[:i], changed(tree[i], rng), *tree[i + 1 :]])
    if isinstance(tree, dict) and tree and rng.random() < 0.6:
        key = rng.choice(sorted(tree))
        return {**tree, key: changed(tree[key], rng)}
    ways = [[tree], (tree,), {"a": tree}, [tree, tree], None if tree is not None else []]
    if isinstance(tree, Leaf):
        kinds = [kind for kind in ("array", "rows", "mirrored") if kind != tree.kind]
        ways += [dataclasses.replace(tree, kind=kind) for kind in kinds] * 2
    elif isinstance(tree, (list, tuple)):
        ways += [tuple(tree) if isinstance(tree, list) else list(tree), dict(zip("abcd", tree, strict=False))]
        ways += [type(tree)(), tree[:-1] or type(tree)([None]), [*tree, None], type(tree)(reversed(tree))]
    elif isinstance(tree, dict):
        ways += [{"d" + key: each for key, each in tree.items()} or [], list(tree.values()), {**tree, "e": None}]
    elif isinstance(tree, Pair):
        ways += [(tree.first, tree.second), Pair(tree.second, tree.first)]
    return rng.choice(ways)


def fitted(tree, call):
    """A structure as the call takes one: with leaves of kinds that it knows, and of its form."""

    def known(leaf, _):
        kind = leaf.kind if leaf.kind in call.kinds + call.refuses else "array"
        return dataclasses.replace(leaf, kind=kind)

    found = build(tree, known)
    if call.form == "list":
        return leaves_of(found)
    if call.form == "leaf":
        return [*leaves_of(found), Leaf("array", "float64", (3,))][0]
    return found


@pytest.fixture(params=layouts("0000", "0011" if SIZE > 2 else "01"))
def nodes(request):
    """A strategy whose ranks are spread over nodes."""
    comm = on_nodes(request.param)
    yield mpistrat.MultiWorkerMirroredStrategy(comm=comm)
    comm.Free()


def in_step(strategy):
    """The ranks are: what they reduce next has the right sum."""
    assert strategy.reduce("SUM", 1.0, axis=None) == SIZE
    one, two = strategy.reduce("SUM", [np.full(2, float(RANK)), np.ones(3)], axis=None)
    assert one.tolist() == [SIZE * (SIZE - 1) / 2] * 2
    assert two.tolist() == [SIZE] * 3


@pytest.mark.parametrize("name", core(CALLS, "reduce", "all_reduce", "all_gather", "batch_reduce_to"))
@settings(max_examples=20)
@given(
    first=trees,
    second=trees,
    relation=st.sampled_from(["equal", "close", "close", "any"]),
    op=st.sampled_from(["SUM", "MEAN"]),
    odd=st.integers(0, SIZE - 1),
    seed=st.integers(0, 2**32 - 1),
)
def test_structures(nodes, name, first, second, relation, op, odd, seed):
    call = CALLS[name]
    if call.one_node and len(nodes.extended.engine.topology.nodes) > 1:
        pytest.skip("MirroredStrategy works on the ranks of one node")
    if relation == "equal":
        second = first
    elif relation == "close":
        second = changed(first, random.Random(seed))
    first, second = fitted(first, call), fitted(second, call)
    mine = second if odd == RANK else first
    others = [first] * (SIZE > 1) + [second]
    if any(leaf.kind == "mirrored" for tree in others for leaf in leaves_of(tree)):
        op = "MEAN"  # their sum is refused
    refused = [any(leaf.kind in call.refuses for leaf in leaves_of(tree)) for tree in others]
    value = build(mine, given_by(RANK))
    if all(refused):
        with pytest.raises(call.errors):
            call.make(nodes, op, value)
    elif SIZE > 1 and comparable(first, name) != comparable(second, name):
        with pytest.raises(MismatchError):
            call.make(nodes, op, value)
    else:
        by_rank = [leaves_of(second if rank == odd else first) for rank in range(SIZE)]
        leaf_by_rank = list(zip(*by_rank, strict=True))
        wanted = build(mine, lambda _, number: call.wanted(op)(leaf_by_rank[number], number))
        same(call.make(nodes, op, value), wanted)
    in_step(nodes)


def comparable(tree, name):
    """What must be equal: the axis that is gathered, or added up with the rows of others, is not."""

    def rest(leaf, _):
        free = name in ("gather", "all_gather") or leaf.kind == "mirrored" or name == "reduce over an axis"
        dtype = None if leaf.kind == "mirrored" else leaf.dtype
        return Leaf(leaf.kind, dtype, None if leaf.kind == "mirrored" else leaf.shape[free:])

    return build(tree, rest)


# --- lists of variables --------------------------------------------------------------------------------

GRADIENTS = ["array", "rows", "none", "left out"]
gradients = st.lists(st.sampled_from(GRADIENTS), min_size=3, max_size=3)


@settings(max_examples=40)
@given(first=gradients, second=gradients, equal=st.booleans(), odd=st.integers(0, SIZE - 1))
def test_apply_gradients(nodes, first, second, equal, odd):
    """Of variables of one shape: which gradient is whose is seen in the names alone."""
    with nodes.scope():
        variables = [mpistrat.Variable(np.zeros((3, 2)), name=f"v{i}") for i in range(3)]
    optimizer = mpistrat.optimizers.SGD(1.0)
    optimizer.build(variables)
    second = first if equal else second
    mine = second if odd == RANK else first
    pairs = []
    for i, (what, variable) in enumerate(zip(mine, variables, strict=True)):
        value = np.full((3, 2), float(i + 1 + RANK))
        gradient = {"array": value, "rows": mpistrat.IndexedSlices(value, np.arange(3), (3, 2)), "none": None}.get(what)
        if what != "left out":
            pairs.append((gradient, variable))
    lacking = [{"none", "left out"}.issuperset(each) for each in ([first] * (SIZE > 1) + [second])]
    step = lambda: nodes.run(lambda: optimizer.apply_gradients(pairs))  # noqa: E731
    if all(lacking):
        with pytest.raises(ValueError, match="No gradients"):
            step()
    elif SIZE > 1 and first != second:
        with pytest.raises(MismatchError):
            step()
    else:
        step()
        for i, (what, variable) in enumerate(zip(mine, variables, strict=True)):
            total = sum(i + 1.0 + rank for rank in range(SIZE)) if what in ("array", "rows") else 0.0
            np.testing.assert_array_equal(variable.read_value(), np.full((3, 2), -total))
    in_step(nodes)


@pytest.mark.full
@settings(max_examples=15)
@given(
    first=st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True),
    second=st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True),
    odd=st.integers(0, SIZE - 1),
    call=st.sampled_from(["save", "save_async", "load", "build", "unaggregated"]),
)
def test_lists_of_variables(nodes, tmp_path, first, second, odd, call):
    with nodes.scope():
        kinds = {
            "a": {},
            "b": {
                "synchronization": mpistrat.VariableSynchronization.ON_READ,
                "aggregation": mpistrat.VariableAggregation.SUM,
            },
            "c": {},
        }
        variables = {name: mpistrat.Variable(2.0, name=name, **more) for name, more in kinds.items()}
    path = tmp_path / "weights.h5"
    save(variables, path)
    mine = [variables[name] for name in (second if odd == RANK else first)]
    optimizer = mpistrat.optimizers.SGD(1.0)
    calls = {
        "save": lambda: save(mine, path),
        "save_async": lambda: save_async(mine, path).wait(),
        "load": lambda: load(mine, path),
        "build": lambda: optimizer.build(mine),
        "unaggregated": lambda: nodes.run(
            lambda: optimizer.apply_gradients([(1.0, v) for v in mine], experimental_aggregate_gradients=False)
        ),
    }
    if SIZE > 1 and first != second:
        with pytest.raises(MismatchError):
            calls[call]()
    else:
        calls[call]()
    in_step(nodes)


@pytest.mark.ranks(min=2)
def test_variables_of_one_name_and_another_kind(nodes, tmp_path):
    with nodes.scope():
        a = mpistrat.Variable(1.0, name="a")
        b = mpistrat.Variable(
            1.0,
            name="b",
            synchronization=mpistrat.VariableSynchronization.ON_READ,
            aggregation=mpistrat.VariableAggregation.SUM,
        )
    with pytest.raises(MismatchError, match="ON_READ"):
        save({"x": b if RANK else a}, tmp_path / "weights.h5")
    in_step(nodes)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_mirrored_values_beside_others(nodes, op):
    """They are not sent, so that the others would wait; their sum is refused."""
    value = mpistrat.Mirrored((np.ones(3),)) if RANK == SIZE - 1 else np.ones(3)
    calls = [
        lambda: nodes.reduce(op, value, axis=None),
        lambda: nodes.reduce(op, {"a": value}, axis=None),
        lambda: nodes.reduce(op, value, axis=0),
        lambda: nodes.extended.reduce_to(op, value, "cpu:0"),
        lambda: nodes.extended.batch_reduce_to(op, [(value, "cpu:0")]),
    ]
    for call in calls:
        with pytest.raises(MismatchError):
            call()
        in_step(nodes)


@pytest.mark.ranks(min=2)
def test_buffers_beside_arrays_in_another_order(nodes):
    buffer = nodes.experimental_buffers_like(np.zeros(3))
    second, third = nodes.experimental_buffers_like([np.zeros(3), np.zeros(3)])
    for one, other in [
        ([buffer, np.ones(3)], [np.ones(3), buffer]),
        ([second, third], [third, second]),
        ([second, third], (second, third)),
        ([buffer, second], [second, buffer]),
        ([second], second),
    ]:
        with pytest.raises(MismatchError):
            nodes.reduce("SUM", other if RANK else one, axis=None)
        in_step(nodes)
    buffer[...] = second[...] = third[...] = 1.0
    for got in nodes.reduce("SUM", {"x": buffer, "y": [second, third]}, axis=None)["y"]:
        assert got.tolist() == [SIZE] * 3


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("aggregation", ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
@pytest.mark.parametrize(
    ("wrong", "error"), [(np.ones(3), ValueError), (1.0, ValueError), (np.ones(2, complex), TypeError)]
)
def test_assigned_values_that_one_rank_refuses(nodes, aggregation, wrong, error):
    with nodes.scope():
        variable = mpistrat.Variable(np.zeros(2), aggregation=getattr(mpistrat.VariableAggregation, aggregation))
    for method in ("assign", "assign_add"):
        assign = getattr(variable, method)
        with pytest.raises(MismatchError, match=rf"rank 0: {method} refused: {error.__name__}"):
            nodes.run(lambda assign=assign: assign(np.ones(2) if RANK else wrong))
        with pytest.raises(error):
            nodes.run(lambda assign=assign: assign(wrong))
        in_step(nodes)
    nodes.run(lambda: variable.assign(np.full(2, 1.0 + RANK)))
    total = {"SUM": SIZE * (SIZE + 1) / 2, "MEAN": (SIZE + 1) / 2}.get(aggregation, 1.0)
    assert variable.read_value().tolist() == [total] * 2


@pytest.mark.ranks(min=2)
def test_values_that_one_rank_refuses(nodes):
    """The others learn of it, although that rank sends nothing."""
    wrong, right = np.array([True, False]), np.ones(2)
    replica = mpistrat.get_replica_context
    calls = [
        lambda value: nodes.reduce("SUM", value, axis=None),
        lambda value: nodes.reduce("SUM", [value], axis=None),
        lambda value: nodes.reduce("SUM", value, axis=0),
        lambda value: nodes.run(lambda: replica().all_reduce("SUM", {"a": value})),
        lambda value: nodes.run(lambda: replica().experimental_all_reduce_async("SUM", value)),
        lambda value: nodes.run(lambda: replica().experimental_reduce_scatter("SUM", value)),
    ]
    for call in calls:
        with pytest.raises(MismatchError, match=r"rank 0: .* refused: TypeError .*bool"):
            call(right if RANK else wrong)
        with pytest.raises(TypeError, match="bool"):
            call(wrong)
        in_step(nodes)
    for call in (
        lambda value: nodes.gather(value, 0),
        lambda value: nodes.run(lambda: replica().all_gather([value], 0)),
        lambda value: nodes.extended.broadcast_to(value, "cpu:0"),
    ):
        with pytest.raises(MismatchError, match=r"rank 0: .* refused: TypeError"):
            call(right if RANK else np.array([object()]))
        in_step(nodes)
