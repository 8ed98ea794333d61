"""Collectives over any communicator give what NumPy computes from the values of all replicas.

Every rank can compute the value of every other one, so each checks its result by itself.
"""

import dataclasses
import functools
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

import mpistrat
from mpistrat.collectives import CommunicationOptions

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
HALVES = ["float16", "bfloat16"]
FLOATS = [*HALVES, "float32", "float64", "complex64", "complex128"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
NUMBERS = [*FLOATS, *INTEGERS]
PLACES = ["self", "node", "world", "reversed half"]
LAYOUTS = ["C", "Fortran", "strided", "negative strides", "byte-swapped", "read-only", "number"]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (0, 4), (4, 0, 2), (2, 3, 5), (8193,), (129, 257)]
TIGHT = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-5, "complex64": 1e-5}

shapes = st.sampled_from(SHAPES)
seeds = st.integers(0, 2**32 - 1)
places = st.sampled_from(PLACES)
ops = st.sampled_from(["SUM", "MEAN"])
layouts = st.sampled_from(LAYOUTS)


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name)


def draw(seed, rank, name, shape, exact=True):
    """Rank ``rank``'s array: any integers, or floating point numbers whose sums are exact if asked for."""
    rng, dtype = np.random.default_rng([seed, rank]), dtype_of(name)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    parts = [rng.integers(-128, 128, shape) / 8 if exact else rng.normal(size=shape) for _ in range(2)]
    return np.asarray(parts[0] + 1j * parts[1] if dtype.kind == "c" else parts[0]).astype(dtype)


def lay_out(array, layout):
    """Equal values, lying differently in memory."""
    if layout == "Fortran":
        return array.copy(order="F")
    if layout == "strided":
        out = np.zeros([2 * n for n in array.shape], array.dtype)[(..., *(slice(1, None, 2),) * array.ndim)]
        out[...] = array
        return out
    if layout == "negative strides":
        return np.flip(np.flip(array).copy())
    if layout == "byte-swapped" and array.dtype.kind != "V":
        return array.astype(array.dtype.newbyteorder(">"))
    if layout == "read-only":
        array = array.copy()
        array.flags.writeable = False
    if layout == "number" and array.ndim == 0:
        return array.item() if array.dtype.kind != "V" else array[()]
    return array


def reduced(op, parts):
    """What a reduction must give. Halves are added in float32 and rounded once; integers wrap around."""
    dtype = parts[0].dtype
    if op == "SUM":
        if dtype.name in HALVES:
            return sum(p.astype(np.float32) for p in parts).astype(dtype)
        return functools.reduce(np.add, parts)
    if dtype.kind in "iu":
        return sum(p.astype(np.float64) for p in parts) / len(parts)
    wide = np.dtype(np.float32) if dtype.name in HALVES else dtype
    return (sum(p.astype(wide) for p in parts) / wide.type(len(parts))).astype(dtype)


def same(got, wanted, exact=True):
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert got.dtype == wanted.dtype
    assert got.dtype.isnative
    assert got.shape == wanted.shape
    if exact and (wanted.dtype.kind in "iuV" or wanted.dtype.name == "float16"):
        np.testing.assert_array_equal(got, wanted)
    else:
        rtol = TIGHT.get(wanted.dtype.name, 1e-12)
        if wanted.dtype.kind == "V":
            got, wanted = got.astype(np.float32), wanted.astype(np.float32)
        scale = max(1.0, float(np.max(np.abs(wanted), initial=0)))
        np.testing.assert_allclose(got, wanted, rtol=rtol, atol=0 if exact else rtol * scale)


@pytest.fixture(scope="module")
def worlds():
    """For each place a strategy, and the ranks of the world that are its replicas, in their order."""
    world = MPI.COMM_WORLD
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    half = world.Split(RANK % 2, key=-RANK)
    strategies = {
        "self": mpistrat.MultiWorkerMirroredStrategy(comm=MPI.COMM_SELF),
        "node": mpistrat.MirroredStrategy(comm=node),
        "world": mpistrat.MultiWorkerMirroredStrategy(),
        "reversed half": mpistrat.MultiWorkerMirroredStrategy(comm=half),
    }
    yield {name: (strategy, strategy.comm.allgather(RANK)) for name, strategy in strategies.items()}
    half.Free()
    node.Free()


def reduce_by(call, strategy, op, value):
    if call == "reduce":
        return strategy.reduce(op, value, axis=None)
    if call == "all_reduce":
        return strategy.run(lambda x: mpistrat.get_replica_context().all_reduce(op, x), args=(value,))
    if call == "reduce_to":
        return strategy.extended.reduce_to(op, mpistrat.PerReplica((value,)), "cpu:0").values[0]
    return strategy.extended.batch_reduce_to(op, [(value, "cpu:0")])[0].values[0]


CALLS = ["reduce", "all_reduce", "reduce_to", "batch_reduce_to"]


@settings(max_examples=120)
@given(
    place=places,
    call=st.sampled_from(CALLS),
    op=ops,
    name=st.sampled_from(NUMBERS),
    shape=shapes,
    layout=layouts,
    exact=st.booleans(),
    seed=seeds,
)
def test_reduce(worlds, place, call, op, name, shape, layout, exact, seed):
    strategy, members = worlds[place]
    parts = [draw(seed, rank, name, shape, exact) for rank in members]
    value = lay_out(draw(seed, RANK, name, shape, exact), layout)
    if isinstance(value, (int, float, complex)):  # a Python number has a dtype of its own
        parts = [np.asarray(part.item()) for part in parts]
        if len({part.dtype for part in parts}) > 1 or parts[0].dtype.kind == "u":
            return  # integers beyond int64
    before = np.array(value)
    first = reduce_by(call, strategy, op, value)
    second = reduce_by(call, strategy, op, value)
    for got in (first, second):
        same(got, reduced(op, parts), exact)
    assert isinstance(first, np.ndarray if isinstance(value, np.ndarray) else np.generic)
    if isinstance(first, np.ndarray) and first.size:
        kept = first.copy()
        assert not np.shares_memory(first, value)
        second[...] = 0
        reduce_by(call, strategy, op, value)
        assert kept.tobytes() == first.tobytes()
    assert np.array(value).tobytes() == before.tobytes()


# --- structures ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pair:
    first: object
    second: object

    def __post_init__(self):
        assert not isinstance(self.first, str), "made by the test, never by the library"


LENGTHS = [0, 0, 1, 3, 100, 4097, 8191, 8192, 8193, 16383, 16384, 16385]
leaves = st.tuples(st.sampled_from(NUMBERS), st.sampled_from(LENGTHS))
trees = st.recursive(
    leaves | st.none(),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.sampled_from("dacb"), inner, max_size=4)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=16,
)


def build(tree, leaf, path=()):
    """A structure of arrays as the description ``tree`` says. Dicts are filled in another order by odd ranks."""
    if tree is None:
        return None
    if isinstance(tree, list):
        return [build(each, leaf, (*path, i)) for i, each in enumerate(tree)]
    if isinstance(tree, dict):
        keys = sorted(tree, reverse=bool(RANK % 2))
        return {key: build(tree[key], leaf, (*path, ord(key))) for key in keys}
    if isinstance(tree, Pair):
        return Pair(build(tree.first, leaf, (*path, 0)), build(tree.second, leaf, (*path, 1)))
    return leaf(*tree, path)


def same_tree(got, wanted):
    assert type(got) is type(wanted)
    if isinstance(wanted, list):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            same_tree(one, other)
    elif isinstance(wanted, dict):
        assert list(got) == list(wanted)
        for key in wanted:
            same_tree(got[key], wanted[key])
    elif isinstance(wanted, Pair):
        same_tree(got.first, wanted.first)
        same_tree(got.second, wanted.second)
    elif wanted is not None:
        same(got, wanted)


OPS = {
    "default": lambda: None,
    "hierarchical, 0 packs": lambda: mpistrat.HierarchicalCopyAllReduce(num_packs=0),
    "hierarchical, 1 pack": lambda: mpistrat.HierarchicalCopyAllReduce(),
    "hierarchical, 3 packs": lambda: mpistrat.HierarchicalCopyAllReduce(num_packs=3),
    "one device": lambda: mpistrat.ReductionToOneDevice(),
}


@pytest.fixture(scope="module")
def by_ops():
    return {name: mpistrat.MirroredStrategy(cross_device_ops=make()) for name, make in OPS.items()}


@settings(max_examples=60)
@given(
    with_ops=st.sampled_from(list(OPS)),
    call=st.sampled_from(["reduce", "all_reduce"]),
    op=ops,
    tree=trees,
    bytes_per_pack=st.sampled_from([0, 1, 4, 1000, 1 << 16, 1 << 20]),
    seed=st.integers(0, 2**31 - 1),
)
def test_structures(by_ops, with_ops, call, op, tree, bytes_per_pack, seed):
    strategy = by_ops[with_ops]
    options = CommunicationOptions(bytes_per_pack=bytes_per_pack)
    spot = {}

    def mine(rank, name, length, path):
        return draw(seed + hash(path) % 2**32, rank, name, (length,))

    def value(name, length, path):
        spot[path] = mine(RANK, name, length, path)
        return spot[path]

    def oracle(name, length, path):
        return reduced(op, [mine(rank, name, length, path) for rank in range(SIZE)])

    given_tree = build(tree, value)
    before = {path: array.tobytes() for path, array in spot.items()}
    if call == "reduce":
        got = strategy.reduce(op, given_tree, axis=None)
    else:
        got = strategy.run(lambda: mpistrat.get_replica_context().all_reduce(op, given_tree, options))
    same_tree(got, build(tree, oracle))
    assert {path: array.tobytes() for path, array in spot.items()} == before


@pytest.fixture(scope="module")
def megabytes():
    """Sizes around the limits of packing (64 KiB), of a piece of a half array and of a message (2 MiB).

    What this rank gives, and what all must get.
    """
    lengths = [0, 1, 16383, 16384, 16385, (256 << 10) + 1, (512 << 10) + 1, 5, (1 << 20) + 3]
    names = ["float32", "float16", "int64", "bfloat16"]

    def value(rank):
        return [
            (np.arange(n, dtype=np.int64) % 61 + rank).astype(dtype_of(name))
            for n in lengths
            for name in (names if n < 100_000 else names[:2])
        ]

    values = [value(rank) for rank in range(SIZE)]
    return values[RANK], [reduced("SUM", parts) for parts in zip(*values, strict=True)]


@pytest.mark.full
@pytest.mark.parametrize("with_ops", OPS)
@pytest.mark.parametrize("bytes_per_pack", [0, 1, 100_000, 1 << 30])
def test_megabytes(by_ops, megabytes, with_ops, bytes_per_pack):
    mine, wanted = megabytes
    given_values = [each.copy() for each in mine]
    options = CommunicationOptions(bytes_per_pack=bytes_per_pack)
    got = by_ops[with_ops].run(lambda: mpistrat.get_replica_context().all_reduce("SUM", given_values, options))
    for one, want in zip(got, wanted, strict=True):
        same(one, want)


# --- gathering and broadcasting ------------------------------------------------------------------------


@settings(max_examples=120)
@given(
    place=places,
    call=st.sampled_from(["gather", "all_gather"]),
    name=st.sampled_from([*NUMBERS, "bool", "U3", "M8[ns]", "complex64"]),
    rest=st.lists(st.integers(0, 4), max_size=2),
    axis=st.integers(-3, 2),
    longest=st.sampled_from([0, 1, 5, 3000]),
    layout=layouts,
    seed=seeds,
)
def test_gather(worlds, place, call, name, rest, axis, longest, layout, seed):
    strategy, members = worlds[place]
    ndim = len(rest) + 1
    if not -ndim <= axis < ndim:
        axis = 0

    def value(rank):
        shape = list(rest)
        shape.insert(axis % ndim, int(np.random.default_rng([seed, rank, 1]).integers(0, longest, endpoint=True)))
        if name in ("U3", "M8[ns]"):
            return draw(seed, rank, "int16", shape).astype(np.int64).astype(name)
        return draw(seed, rank, name, shape)

    mine = lay_out(value(RANK), layout)
    before = mine.tobytes()
    wanted = np.concatenate([value(rank) for rank in members], axis)
    results = []
    for _ in range(2):
        if call == "gather":
            results.append(strategy.gather(mine, axis))
        else:
            results.append(strategy.run(lambda: mpistrat.get_replica_context().all_gather(mine, axis)))
    for got in results:
        assert got.shape == wanted.shape
        assert got.dtype.newbyteorder("=") == wanted.dtype.newbyteorder("=")
        np.testing.assert_array_equal(got, wanted)
        assert not np.shares_memory(got, mine)
    if results[0].size:
        results[1][...] = np.zeros((), results[1].dtype)
        np.testing.assert_array_equal(results[0], wanted)
    assert mine.tobytes() == before


@settings(max_examples=100)
@given(place=places, name=st.sampled_from([*NUMBERS, "bool", "U3", "M8[ns]"]), shape=shapes, layout=layouts, seed=seeds)
def test_broadcast_to(worlds, place, name, shape, layout, seed):
    strategy, members = worlds[place]

    def value(rank):
        if name in ("U3", "M8[ns]"):
            return lay_out(draw(seed, rank, "int16", shape).astype(np.int64).astype(name), layout)
        return lay_out(draw(seed, rank, name, shape), layout)

    mine, wanted = value(RANK), value(members[0])
    if len({np.asarray(value(rank)).dtype for rank in members}) > 1:
        return  # Python numbers and strings of different size
    before = np.array(mine)
    for _ in range(2):
        got = strategy.extended.broadcast_to(mine, "cpu:0")
        assert isinstance(got, mpistrat.Mirrored)
        np.testing.assert_array_equal(got.values[0], wanted)
        assert np.asarray(got.values[0]).shape == shape
    if isinstance(mine, np.ndarray):
        assert not np.shares_memory(got.values[0], mine)
        got.values[0][...] = np.zeros((), got.values[0].dtype)
    np.testing.assert_array_equal(np.array(mine), before)


# --- reductions over axes ------------------------------------------------------------------------------


AXES = [0, 1, 2, -1, -2, -3, (0,), (0, 1), (1, 0), (0, -1), (0, 1, 2), (-3, -1), ()]


@settings(max_examples=120)
@given(
    place=places,
    op=ops,
    name=st.sampled_from(NUMBERS),
    axis=st.sampled_from(AXES),
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple),
    layout=layouts,
    seed=seeds,
)
def test_reduce_over_axes(worlds, place, op, name, axis, shape, layout, seed):
    strategy, members = worlds[place]
    axes = axis if isinstance(axis, tuple) else (axis,)
    over = {i % len(shape) for i in axes if -len(shape) <= i < len(shape)}
    if len(over) != len(axes):
        with pytest.raises(ValueError):
            strategy.reduce(op, draw(seed, RANK, name, shape), axis=axis)
        return

    def value(rank):
        """Lengths along the axes that are reduced differ between the ranks."""
        lengths = np.random.default_rng([seed, rank, 2]).integers(0, 5, len(shape))
        return draw(seed, rank, name, [lengths[i] if i in over else n for i, n in enumerate(shape)])

    parts = [value(rank) for rank in members]
    dtype = parts[0].dtype
    count = sum(math.prod(part.shape[i] for i in over) for part in parts)
    if op == "SUM":
        wide = np.dtype(np.float32) if dtype.name in HALVES else np.sum(np.empty(0, dtype)).dtype
        sums = [np.sum(part.astype(wide), tuple(over)) for part in parts]
        wanted = np.asarray(functools.reduce(np.add, sums))
        wanted = wanted.astype(dtype) if dtype.name in HALVES else wanted
    else:
        wide = {"f": np.float64, "V": np.float64, "c": np.complex128}.get(dtype.kind, np.float64)
        with np.errstate(invalid="ignore"):
            wanted = np.asarray(sum(np.sum(part.astype(wide), tuple(over)) for part in parts) / np.int64(count))
        wanted = wanted.astype(np.float64 if dtype.kind in "iu" else dtype)
    mine = lay_out(value(RANK), layout)
    before = mine.tobytes()
    for _ in range(2):
        got = strategy.reduce(op, mine, axis=axis)
        same(got, wanted, exact=op == "SUM")
    assert mine.tobytes() == before
