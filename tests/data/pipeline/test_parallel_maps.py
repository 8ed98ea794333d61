"""Tests of map() with parallel calls: the elements, their order and their errors stay."""

import threading

import numpy as np
import pytest

import mpistrat
from mpistrat.data import AUTOTUNE, Dataset


@pytest.mark.parametrize("calls", [None, 1, 2, 8, AUTOTUNE])
@pytest.mark.parametrize("make", [Dataset.range, lambda n: Dataset.from_iterable(range(n))], ids=["known", "unknown"])
def test_the_order_stays(make, calls):
    rows = make(10).map(lambda x: x + 1).map(lambda x: x * 2, num_parallel_calls=calls, deterministic=False)
    assert [batch.tolist() for batch in rows.batch(4)] == [[2, 4, 6, 8], [10, 12, 14, 16], [18, 20]]
    assert [int(x) for x in rows] == [*range(2, 22, 2)]


def test_calls_run_at_the_same_time():
    together = threading.Barrier(4, timeout=250)

    def fn(x):
        together.wait()  # returns when four calls are here
        return x

    before = threading.active_count()
    (batch,) = Dataset.range(4).map(fn, num_parallel_calls=4).batch(4)
    assert batch.tolist() == [0, 1, 2, 3]
    assert threading.active_count() < before + 10


def test_errors_and_the_strategy_of_parallel_calls():
    strategy = mpistrat.OneDeviceStrategy("cpu:0")

    def fn(x):
        if x == 3:
            raise KeyError("three")
        return np.int64(mpistrat.get_strategy() is strategy)

    with strategy.scope():
        rows = Dataset.range(6).map(fn, num_parallel_calls=3)
        assert rows.take(3).batch(3).__iter__().get_next().tolist() == [1, 1, 1]
        with pytest.raises(KeyError, match="three"):
            list(rows.batch(6))


def test_numbers_of_calls_that_are_wrong():
    for wrong, kind in ((0, ValueError), (-2, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(kind, match="num_parallel_calls"):
            Dataset.range(3).map(bool, num_parallel_calls=wrong)
