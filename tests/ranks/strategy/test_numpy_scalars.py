"""NumPy scalars are reduced as arrays without axes are, by as few Python calls."""

import sys

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
TYPES = [np.dtype(char).type for char in np.typecodes["AllInteger"] + np.typecodes["AllFloat"]]
REAL = [each for each in TYPES if not issubclass(each, np.complexfloating)]
SERIAL = {"SUM": np.sum, "MEAN": np.mean, "MAX": np.max, "PROD": np.prod}


def ways(strategy, op, value):
    """Yield the ways to reduce a value: alone, and beside another."""
    replica = mpistrat.get_replica_context
    yield lambda: strategy.reduce(op, value, axis=None)
    yield lambda: strategy.run(lambda: replica().all_reduce(op, value))
    yield lambda: strategy.reduce(op, (value, np.ones(2)), axis=None)[0]
    yield lambda: strategy.extended.reduce_to(op, value, "cpu:0").values[0]


@pytest.mark.parametrize("op", ["SUM", "MEAN", "MAX", "PROD"])
def test_results_are_those_of_numpy(strategy, op):
    for kind in REAL if op == "MAX" else TYPES:
        values = np.arange(1, SIZE + 1).astype(kind)
        expected = SERIAL[op](values, **({} if op in ("MAX", "MEAN") else {"dtype": kind}))
        array = strategy.reduce(op, np.array(values[RANK]), axis=None)
        assert (array.shape, array.dtype) == ((), expected.dtype)
        for total in (array, *(way() for way in ways(strategy, op, values[RANK]))):
            assert (total, total.dtype) == (expected, expected.dtype)


def test_large_integers(strategy):
    for number, total in [(1 << 63, np.uint64), (-(1 << 63), np.int64)]:
        for way in ways(strategy, "MAX", number):
            assert way() == number
            assert way().dtype == total


def test_numbers_beside_arrays(strategy):
    array = np.full((2, 3), float(RANK))
    value = {"a": array, "b": np.float32(2), "c": [3, np.array(4)], "d": 0.5j}
    total = strategy.reduce("SUM", value, axis=None)
    np.testing.assert_array_equal(total["a"], sum(np.full((2, 3), float(rank)) for rank in range(SIZE)))
    assert (total["b"], total["c"], total["d"]) == (2 * SIZE, [3 * SIZE, 4 * SIZE], 0.5j * SIZE)
    assert [type(each) for each in (total["b"], *total["c"], total["d"])] == [
        np.float32,
        np.int64,
        np.ndarray,
        np.complex128,
    ]


def test_numbers_beside_other_values(strategy):
    for other in (True, np.True_, 1 << 100, np.str_("a"), np.datetime64(1, "s")):
        for value in ([np.float32(1), other], [np.ones(3), other]):
            with pytest.raises(TypeError):
                strategy.reduce("SUM", value, axis=None)


def test_as_few_calls_as_an_array(strategy):
    def calls(value):
        def reduce():
            strategy.reduce("SUM", value, axis=None)
            strategy.run(lambda: mpistrat.get_replica_context().all_reduce("SUM", value))

        for _ in range(3):
            reduce()
        entered = []
        sys.setprofile(lambda frame, event, argument: entered.append(event) if event == "call" else None)
        try:
            reduce()
        finally:
            sys.setprofile(None)
        return len(entered)

    assert calls(np.float32(1)) <= calls(np.ones(1, np.float32)) + 2
