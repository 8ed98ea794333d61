"""Small messages, which have a way of their own from the second call on."""

import itertools

import numpy as np
import pytest
from layouts import layouts, on_nodes
from mpi4py import MPI

import mpistrat
from mpistrat.collectives.operations import FurtherOp
from mpistrat.collectives.options import CommunicationOptions
from mpistrat.runtime.agreement.operation import MismatchError
from mpistrat.values import ReduceOp

pytestmark = pytest.mark.four_ranks

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size

ARRAYS = {
    "one": [(5,)],
    "number": [()],
    "matrix": [(3, 4)],
    "list": [(5,), (5,), (2,)],
    "list_of_all_kinds": [(), (3, 2), (7,), (1, 1, 2)],
    "longest": [(4096,)],
    "longest_between_nodes": [(60_000,)],
}


@pytest.fixture(params=layouts("0000", "0001", "0101", "0123"))
def strategy(request):
    """On the nodes that a layout puts the ranks on."""
    made = mpistrat.MultiWorkerMirroredStrategy(comm=on_nodes(request.param))
    yield made
    made.comm.Free()


def values(shapes, dtype):
    rng = np.random.default_rng([RANK, len(shapes)])
    return [(rng.normal(size=shape) * 9).astype(dtype) for shape in shapes]


def reduced(strategy, op, arrays, timeout_seconds=None):
    by_leaders = len(strategy.extended.engine.topology.nodes) > 1 and arrays[0].size > 4096
    options = CommunicationOptions(timeout_seconds=timeout_seconds, implementation="leader" if by_leaders else "AUTO")
    return strategy.extended.engine.ops.all_reduce(op, arrays, options)


@pytest.mark.parametrize("name", ARRAYS)
def test_bits_are_those_of_the_general_way(strategy, name):
    for op, dtype in itertools.product(
        [ReduceOp.SUM, ReduceOp.MEAN, FurtherOp.PROD], ["float32", "complex128", "int64"]
    ):
        arrays = [np.asarray(value) for value in values(ARRAYS[name], dtype)]
        general = reduced(strategy, op, arrays, timeout_seconds=60)  # which never goes the short way
        for _ in range(3):
            for total, expected in zip(reduced(strategy, op, arrays), general, strict=True):
                assert type(total) is np.ndarray
                assert (total.shape, total.dtype) == (expected.shape, expected.dtype)
                assert total.tobytes() == expected.tobytes()


def test_arrays_in_any_order_of_memory(strategy):
    own = np.arange(24.0).reshape(4, 6) * (RANK + 1)
    for _, view in itertools.product(range(3), (own, own.T, own[::2, ::-1], np.asfortranarray(own))):
        total = strategy.reduce("SUM", view, axis=None)
        np.testing.assert_array_equal(total, view / (RANK + 1) * SIZE * (SIZE + 1) / 2)


def test_results_are_of_their_own(strategy):
    first = strategy.reduce("SUM", np.full(4, 1.0), axis=None)
    kept = [strategy.reduce("SUM", np.full(4, float(i)), axis=None) for i in range(4)]
    assert first.tolist() == [SIZE] * 4
    assert [total[0] for total in kept] == [SIZE * i for i in range(4)]


@pytest.mark.parametrize("length", [1, 5, 5000, 300_000])
def test_floating_point_errors_are_values(strategy, length):
    huge = np.full(length, np.finfo(np.float64).max)
    expected = np.inf if SIZE > 1 else huge[0]
    for op in ("SUM", "SUM", "MEAN", "MEAN"):
        with np.errstate(all="raise"):
            one = strategy.reduce(op, huge, axis=None)
            many = strategy.reduce(op, [huge, huge[:1]], axis=None)
        assert one[0] == many[0][0] == many[1][0] == expected


@pytest.mark.ranks(min=2)
def test_ranks_that_differ_all_hear_of_it_and_go_on(strategy):
    same, other = np.ones(3), np.ones(4)
    for _ in range(3):
        for array in (same, other):
            strategy.reduce("SUM", array, axis=None)
        with pytest.raises(MismatchError, match=r"rank 0: all_reduce SUM float64\[4\]"):
            strategy.reduce("SUM", same if RANK else other, axis=None)
    assert strategy.reduce("SUM", same, axis=None).tolist() == [SIZE] * 3


@pytest.mark.full
@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("nbytes", [0, 8, 40_000, 1 << 20])
def test_ranks_that_differ_by_much(strategy, nbytes):
    """A leader hears of it from one whose message is far longer than its own, and the other way round."""
    array = np.ones(nbytes // 8)
    for late in (0, SIZE - 1):
        for _ in range(3):
            reduced(strategy, ReduceOp.SUM, [np.ones(131_072)])
            strategy.reduce("SUM", array, axis=None)
        mine = np.ones(3, np.int16) if late == RANK else array
        with pytest.raises(MismatchError):
            reduced(strategy, ReduceOp.SUM, [mine])
    assert strategy.reduce("SUM", np.ones(3), axis=None).tolist() == [SIZE] * 3


@pytest.mark.parametrize("length", [1, 1000, 30_001])
def test_buffers(strategy, length):
    (buffer,) = strategy.experimental_buffers_like([np.empty(length, np.float64)])
    for op in (ReduceOp.SUM, ReduceOp.MEAN, FurtherOp.MAX):
        own = values([(length,)], "float64")[0]
        (expected,) = reduced(strategy, op, [own], timeout_seconds=60)
        for _ in range(3):
            buffer[...] = own
            (total,) = reduced(strategy, op, [buffer])
            assert total is buffer
            if op is FurtherOp.MAX:
                np.testing.assert_array_equal(buffer, expected)
            else:
                np.testing.assert_allclose(buffer, expected, rtol=1e-14)
    del buffer, total


def test_buffers_of_all_kinds(strategy):
    """Of lengths that fill no cache line, and of dtypes of which some cannot be reduced where they are."""
    shapes = [(np.float32, 50), (np.float32, 17), (np.float16, 9), (np.float32, 300_000), (np.float64, 1)]
    tree = [np.empty(length, dtype) for dtype, length in shapes]
    buffers = strategy.experimental_buffers_like(tree)
    for _ in range(3):
        for i, buffer in enumerate(buffers):
            buffer[...] = RANK + i
        totals = strategy.run(lambda: mpistrat.get_replica_context().all_reduce("SUM", buffers))
        for i, (buffer, total) in enumerate(zip(buffers, totals, strict=True)):
            assert total is buffer
            assert (buffer == SIZE * (SIZE - 1) / 2 + i * SIZE).all()
    (one,) = strategy.run(lambda: mpistrat.get_replica_context().all_reduce("MEAN", buffers[1:2]))
    assert (one == SIZE * (SIZE - 1) / 2 + SIZE).all()  # the mean of equals
    assert (buffers[0] == SIZE * (SIZE - 1) / 2).all()
    assert (buffers[3] == SIZE * (SIZE - 1) / 2 + 3 * SIZE).all()


@pytest.mark.ranks(min=2)
def test_a_communicator_that_was_freed():
    strategy = mpistrat.MultiWorkerMirroredStrategy(comm=MPI.COMM_WORLD.Dup())
    for _ in range(3):
        strategy.reduce("SUM", np.ones(3), axis=None)
    strategy.comm.Free()
    with pytest.raises(RuntimeError, match="freed"):
        strategy.reduce("SUM", np.ones(3), axis=None)


@pytest.mark.full
def test_more_kinds_of_messages_than_are_kept():
    ops = mpistrat.MultiWorkerMirroredStrategy().extended.engine.ops
    for length in [*range(1, 1030), *range(1, 3)]:
        (total,) = ops.all_reduce(ReduceOp.SUM, [np.full(length, 1.0)], CommunicationOptions())
        assert total[-1] == SIZE
