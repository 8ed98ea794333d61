"""A reduction returns new arrays, also on one rank, where they are copies of its values."""

import numpy as np
import pytest

import mpistrat

ARRAYS = {
    "a vector": np.arange(5, dtype=np.float32),
    "a number": np.array(3.5),
    "without elements": np.zeros((0, 3), np.float32),
    "in Fortran's order": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "every other column": np.arange(24, dtype=np.int32).reshape(4, 6)[:, ::2],
    "narrow integers": np.arange(7, dtype=np.int8),
    "halves": np.linspace(-1, 1, 9).astype(np.float16),
    "of another byte order": np.arange(6, dtype=">f8"),
    "large": np.arange(1 << 17, dtype=np.float32),
}


def check(total, value, size):
    assert type(total) is np.ndarray
    assert total.dtype == value.dtype.newbyteorder("=")
    assert total.flags.c_contiguous
    assert total.flags.writeable
    assert not np.shares_memory(total, value)
    np.testing.assert_array_equal(total, value * value.dtype.type(size))


@pytest.mark.parametrize("name", ARRAYS)
def test_array(name):
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    value = ARRAYS[name]
    for _ in range(2):
        check(strategy.reduce("SUM", value, axis=None), value, strategy.num_replicas_in_sync)


def test_list():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    values = list(ARRAYS.values())
    for _ in range(2):
        totals = strategy.reduce("SUM", values, axis=None)
        for total, value in zip(totals, values, strict=True):
            check(total, value, strategy.num_replicas_in_sync)


def test_mean_of_integers():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    for _ in range(2):
        mean = strategy.reduce("MEAN", np.arange(4), axis=None)
        assert mean.dtype == np.float64
        np.testing.assert_array_equal(mean, np.arange(4.0))
