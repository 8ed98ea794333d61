"""Broadcast, all-gather and reduce-scatter on every layout of nodes, against a serial oracle."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from layouts import layouts
from mpi4py import MPI

import mpistrat
from mpistrat.collectives.movement.moves import all_gather, broadcast
from mpistrat.collectives.operations import COMBINE, FurtherOp
from mpistrat.collectives.reduce_scatter import reduce_scatter
from mpistrat.runtime.agreement.operation import MismatchError
from mpistrat.runtime.topology import Limits, Topology
from mpistrat.values import ReduceOp

pytestmark = pytest.mark.four_ranks

SIZE, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank

SLOT_BYTES = 10_000
SMALL = Limits(
    slot_bytes=SLOT_BYTES,
    slot_bytes_between_nodes=SLOT_BYTES,
    same_place_bytes=1_000,
    broadcast_alone_bytes=30_000,
    message_bytes=5_000,
    chunk_bytes=20_000,
)


@pytest.fixture(params=[*layouts("0000", "0011", "0001", "0101", "0110", "0123"), "no shared memory"])
def make(request):
    """Call ``make(**limits)`` for a topology of ranks spread over nodes, with room for small pieces only."""
    comms = []

    def call(**limits):
        comms.append(MPI.COMM_WORLD.Dup())
        if request.param == "no shared memory":
            split, memory = [range(SIZE)], {"slot_bytes": 0}
        else:
            split, memory = (lambda comm: int(request.param[comm.rank])), {}
        return Topology.of(comms[-1], split=split, limits=dataclasses.replace(SMALL, **(memory | limits)))

    yield call
    for comm in comms:
        comm.Free()


@pytest.fixture
def topology(make):
    return make()


def some(rank, shape, dtype):
    """Values that tell rank and place, small enough that their sums are exact in every dtype."""
    return ((np.arange(int(np.prod(shape))) * 7 + 3 * rank) % 11).reshape(shape).astype(dtype)


# --- broadcast -----------------------------------------------------------------------------------------


LISTS = {
    "nothing": [],
    "empty": [("f8", (0,)), ("i1", (3, 0))],
    "a scalar": [("f8", ())],
    "small": [("f4", (3, 5)), ("u1", ()), ("f2", (0,)), ("c16", (7,)), ("?", (13,))],
    "just a message": [("u1", (8 << 10,))],
    "more than a message": [("u1", (8 << 10,)), ("u1", (1,))],
    "just a slot": [("u1", (SLOT_BYTES,))],
    "many": [("f4", (each % 5, 3, each % 7)) for each in range(200)],
    "large": [("f8", (3,)), (">i4", (9_001,)), ("f2", (5,)), ("M8[s]", (4_001,)), (ml_dtypes.bfloat16, (17,))],
}


@pytest.mark.parametrize("name", LISTS)
def test_broadcast(topology, name):
    for root in {0, SIZE // 2, SIZE - 1}:
        for turn in range(2):
            values = [some(RANK + turn, shape, dtype) for dtype, shape in LISTS[name]]
            before = [value.copy() for value in values]
            got = broadcast(topology, values, root=root)
            for (dtype, shape), each in zip(LISTS[name], got, strict=True):
                want = some(root + turn, shape, dtype)
                assert (each.dtype, each.shape) == (want.dtype, want.shape)
                assert each.tobytes() == want.tobytes()
                assert each.flags.c_contiguous
                assert each.flags.writeable
            for value, same, each in zip(values, before, got, strict=True):
                assert value.tobytes() == same.tobytes()
                assert not np.shares_memory(value, each)


def test_broadcast_of_what_is_not_contiguous(topology):
    for length in (10, 5_001):
        value = some(RANK, (length, 6), "f8")[::2, 1:4].T
        (got,) = broadcast(topology, [value])
        np.testing.assert_array_equal(got, some(0, (length, 6), "f8")[::2, 1:4].T)


def test_broadcast_refuses_objects(topology):
    with pytest.raises(TypeError, match="objects"):
        broadcast(topology, [np.zeros(3), np.array([None])])
    topology.barrier()


@pytest.mark.ranks(min=2)
def test_broadcasts_that_differ(topology):
    for length in (1, 500, 10_000):
        with pytest.raises(ValueError, match="do not fit together"):
            broadcast(topology, [np.zeros(length + (RANK == SIZE - 1))])
        with pytest.raises(ValueError, match="do not fit together"):
            broadcast(topology, [np.zeros(length)], root=int(RANK == SIZE - 1))
        with pytest.raises(ValueError, match="do not fit together"):
            broadcast(topology, [np.zeros(length if RANK else 0)])
        with pytest.raises(MismatchError, match="different collectives"):
            broadcast(topology, [np.zeros(length)]) if RANK else topology.barrier()
        np.testing.assert_array_equal(broadcast(topology, [np.full(length, RANK)])[0], np.zeros(length))


# --- all-gather ----------------------------------------------------------------------------------------


def check_gather(topology, shape_of, dtype, axis):
    for turn in range(2):
        got = all_gather(topology, some(RANK + turn, shape_of(RANK), dtype), axis)
        parts = [some(rank + turn, shape_of(rank), dtype) for rank in range(SIZE)]
        want = np.concatenate(parts, axis, dtype=dtype)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert got.tobytes() == want.tobytes()
        assert got.flags.c_contiguous
        assert got.flags.writeable


@pytest.mark.parametrize("dtype", ["u1", ">f8", "c16", ml_dtypes.bfloat16], ids=str)
def test_all_gather(topology, dtype):
    for length in (0, 1, 31, 63, 1_000, 9_992, 9_993, 30_011):
        check_gather(topology, lambda rank, n=length: (n,), dtype, 0)
        check_gather(topology, lambda rank, n=length: (n * (rank == 1) + rank,), dtype, -1)


def test_all_gather_along_axes(topology):
    for axis in range(3):
        for length in (2, 40):

            def shape(rank, axis=axis, length=length):
                return tuple(length + rank if each == axis else length for each in range(3))

            check_gather(topology, shape, "f8", axis)
    check_gather(topology, lambda rank: (rank, 0), "f8", 0)
    check_gather(topology, lambda rank: (0, 3), "f8", 0)
    check_gather(topology, lambda rank: (0, 3 + rank), "f8", 1)


def test_all_gather_of_what_is_not_contiguous(topology):
    for length in (8, 9_000):
        got = all_gather(topology, some(RANK, (length, 3), "f4")[::2, 1], 0)
        want = np.concatenate([some(rank, (length, 3), "f4")[::2, 1] for rank in range(SIZE)])
        np.testing.assert_array_equal(got, want)


def test_all_gather_beyond_what_a_message_can_count(make):
    topology = make(gathered_bytes=50_000, message_bytes=9_999)
    check_gather(topology, lambda rank: (10_007 + rank, 2), "f4", 0)
    assert (broadcast(topology, [np.full((10_007, 2), RANK)])[0] == 0).all()


def test_all_gather_by_more_ranks_than_fit_the_first_message(make):
    topology = make(with_agreement_bytes=8 * SIZE - 1)
    check_gather(topology, lambda rank: (rank, 3), "f4", 0)
    check_gather(topology, lambda rank: (3_000, 3), "f4", 0)


@pytest.mark.ranks(min=2)
def test_all_gathers_that_differ(topology):
    for length in (1, 10_000):
        with pytest.raises(ValueError, match="do not fit together"):
            all_gather(topology, np.zeros((length, 2 + (RANK == SIZE - 1))), 0)
        with pytest.raises(ValueError, match="do not fit together"):
            all_gather(topology, np.zeros(length, "f4" if RANK else "f8"), 0)
        with pytest.raises(MismatchError, match="different collectives"):
            all_gather(topology, np.zeros(length), 0) if RANK else broadcast(topology, [np.zeros(length)])
        check_gather(topology, lambda rank, n=length: (n + rank,), "f4", 0)
    for value, error in [(np.zeros(()), ValueError), (np.array([None]), TypeError)]:
        with pytest.raises(error):
            all_gather(topology, value, 0)


# --- reduce-scatter ------------------------------------------------------------------------------------


def check_scatter(topology, shape, dtype, op):
    for turn in range(2):
        values = [some(rank + turn, shape, dtype) for rank in range(SIZE)]
        total = COMBINE[op].reduce([value.astype("c16" if dtype == "c8" else "f8") for value in values])
        want = np.array_split(total / SIZE if op is ReduceOp.MEAN else total, SIZE)[RANK]
        got = reduce_scatter(topology, op, values[RANK])
        integer = np.dtype(dtype).kind in "iu"
        assert got.dtype == (np.dtype("f8") if integer and op is ReduceOp.MEAN else np.dtype(dtype).newbyteorder("="))
        assert got.shape == want.shape
        tolerance = 0.01 if np.dtype(dtype).name in ("float16", "bfloat16") else 1e-6
        np.testing.assert_allclose(got.astype(want.dtype), want, rtol=tolerance)
        np.testing.assert_array_equal(values[RANK], some(RANK + turn, shape, dtype))


@pytest.mark.parametrize("dtype", ["f4", "i1", "u8", ml_dtypes.bfloat16, "c8", ">f4", "g"], ids=str)
def test_reduce_scatter(topology, dtype):
    for shape in [(0,), (1,), (7,), (5, 0), (3, 5, 7), (101, 37), (12_347,)]:
        for op in (ReduceOp.SUM, ReduceOp.MEAN):
            check_scatter(topology, shape, dtype, op)
    if np.dtype(dtype).kind != "c":
        for op in (FurtherOp.MAX, FurtherOp.MIN):
            check_scatter(topology, (1_201, 2), dtype, op)


def test_reduce_scatter_of_what_is_not_contiguous(topology):
    for length in (10, 9_000):
        got = reduce_scatter(topology, ReduceOp.SUM, some(RANK, (length, 3), "f4")[::2, 1])
        total = np.sum([some(rank, (length, 3), "f4")[::2, 1] for rank in range(SIZE)], axis=0)
        np.testing.assert_array_equal(got, np.array_split(total, SIZE)[RANK])


def test_reduce_scatter_and_all_gather_make_an_all_reduce(topology):
    value = some(RANK, (3_001, 3), "f8")
    part = reduce_scatter(topology, ReduceOp.SUM, value)
    want = np.sum([some(rank, (3_001, 3), "f8") for rank in range(SIZE)], axis=0)
    np.testing.assert_array_equal(all_gather(topology, part, 0), want)


@pytest.mark.parametrize("value", [np.ones(()), np.ones(3, bool), np.array([None]), np.array(["a"])], ids=repr)
def test_reduce_scatter_refuses(topology, value):
    with pytest.raises(TypeError if value.ndim else ValueError):
        reduce_scatter(topology, ReduceOp.SUM, value)
    topology.barrier()


@pytest.mark.ranks(min=2)
def test_reduce_scatters_that_differ(topology):
    for length in (SIZE, 10_000):
        with pytest.raises(ValueError, match="do not fit together"):
            reduce_scatter(topology, ReduceOp.SUM, np.zeros(length + (RANK == SIZE - 1)))
        with pytest.raises(ValueError, match="do not fit together"):
            reduce_scatter(topology, ReduceOp.SUM, np.zeros(length if RANK else 0))
        with pytest.raises(ValueError, match="do not fit together"):
            reduce_scatter(topology, ReduceOp.MEAN if RANK else ReduceOp.SUM, np.zeros(length))
        with pytest.raises(MismatchError, match="different collectives"):
            reduce_scatter(topology, ReduceOp.SUM, np.zeros(length)) if RANK else topology.barrier()
        check_scatter(topology, (length, 2), "f4", ReduceOp.SUM)


def test_reduce_scatter_of_a_structure(strategy):
    value = {"a": some(RANK, (5, 3), "f4"), "b": [some(RANK, (SIZE + 1,), "i4")]}

    def fn():
        return mpistrat.get_replica_context().experimental_reduce_scatter("mean", value)

    for _ in range(2):
        got = strategy.run(fn)
        for each, shape in [(got["a"], (5, 3)), (got["b"][0], (SIZE + 1,))]:
            mean = np.mean([some(rank, shape, "f8") for rank in range(SIZE)], axis=0)
            np.testing.assert_allclose(each, np.array_split(mean, SIZE)[RANK], rtol=1e-6)
    slices = mpistrat.IndexedSlices(np.ones((1, 2)), np.array([0]), (3, 2))
    for wrong, error in [(slices, TypeError), (3.0, ValueError), (np.ones(3, bool), TypeError)]:
        with pytest.raises(error):
            strategy.run(lambda wrong=wrong: mpistrat.get_replica_context().experimental_reduce_scatter("SUM", wrong))


@pytest.mark.parametrize("name", ["ordered", "exact"])
def test_reduce_scatter_refuses_promises_that_it_does_not_keep(name):
    options = mpistrat.experimental.CommunicationOptions(implementation=name)

    def scatter(options=None):
        return mpistrat.get_replica_context().experimental_reduce_scatter("SUM", [np.ones(3)], options)

    with pytest.raises(ValueError, match=f"cannot be {name}"):
        mpistrat.MultiWorkerMirroredStrategy().run(scatter, args=(options,))
    strategy = mpistrat.MultiWorkerMirroredStrategy(communication_options=options)
    with pytest.raises(ValueError, match=f"cannot be {name}"):
        strategy.run(scatter)
