"""The precision in which values are added up: halves, integers, infinities."""

import ml_dtypes
import numpy as np
import pytest
from every_way import ALL_OPS
from mpi4py import MPI

import mpistrat
from mpistrat.collectives import CollectiveAllReduce

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


HALVES = [np.float16, ml_dtypes.bfloat16]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("length", [1, 5, 40_000, 300_001])
@pytest.mark.parametrize("with_ops", [CollectiveAllReduce, mpistrat.ReductionToOneDevice])
def test_halves_are_added_in_float32_and_rounded_once(dtype, length, with_ops):
    """A half that is as large as its precision reaches does not change by 1, but by 1 + 1 + 1."""
    strategy = mpistrat.MirroredStrategy(cross_device_ops=with_ops())
    large = 2048 if dtype is np.float16 else 256
    value = np.full(length, large if RANK == 0 else 1, dtype)
    exact = np.float32(large + SIZE - 1)
    for got, wanted in (
        (strategy.reduce("SUM", value, axis=None), exact),
        (strategy.reduce("MEAN", value, axis=None), exact / np.float32(SIZE)),
        (strategy.reduce("SUM", [value, value], axis=None)[1], exact),
    ):
        assert got.dtype == dtype
        assert set(got.tolist()) == {float(np.asarray(wanted).astype(dtype))}


def test_mean_of_halves_does_not_overflow(strategy):
    largest = np.finfo(np.float16).max
    value = np.full(3, largest, np.float16)
    assert (strategy.reduce("MEAN", value, axis=None) == largest).all()
    assert strategy.reduce("MEAN", value, axis=0) == largest


def test_infinities_over_an_axis_are_values_whatever_the_settings(strategy):
    """As without an axis: a rank that raised alone would leave the others waiting."""
    with np.errstate(all="raise"):
        large = np.full(5, 60000, np.float16)
        assert strategy.reduce("SUM", large, axis=0) == np.inf
        assert strategy.reduce("SUM", large[0], axis=None) == (np.inf if SIZE > 1 else 60000)
        own = np.array([np.inf, -np.inf]) if RANK == 0 else np.ones(2)
        for op in ("SUM", "MEAN"):
            assert np.isnan(strategy.reduce(op, own, axis=0))
        assert strategy.reduce("SUM", np.full(2, 1.7e308), axis=(0,)) == np.inf
        assert np.isnan(strategy.reduce("MEAN", np.ones(0), axis=0))


@pytest.mark.parametrize("dtype", HALVES)
def test_axis_of_halves_is_added_in_float32(strategy, dtype):
    value = np.ones(3000, dtype)
    assert strategy.reduce("SUM", value, axis=0) == np.float32(3000 * SIZE).astype(dtype)
    assert strategy.reduce("MEAN", value, axis=0) == 1


SMALL_INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]


@pytest.mark.parametrize("name", SMALL_INTEGERS)
@pytest.mark.parametrize("length", [1, 19, 70_001])
@pytest.mark.parametrize("with_ops", ALL_OPS)
def test_sum_of_integers_wraps_around_at_every_place(name, length, with_ops):
    """Open MPI adds some of the elements with saturation and others without, by the processor."""
    strategy = mpistrat.MirroredStrategy(cross_device_ops=ALL_OPS[with_ops]())
    dtype = np.dtype(name)
    value = np.full(length, np.iinfo(dtype).max - 1, dtype)
    got = strategy.reduce("SUM", value, axis=None)
    assert got.dtype == dtype
    wanted = np.zeros(length, dtype)
    for _ in range(SIZE):
        wanted += value
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", SMALL_INTEGERS)
@pytest.mark.parametrize("length", [1, 19, 70_001])
@pytest.mark.parametrize("with_ops", ALL_OPS)
def test_mean_of_integers_does_not_overflow(name, length, with_ops):
    strategy = mpistrat.MirroredStrategy(cross_device_ops=ALL_OPS[with_ops]())
    largest = np.iinfo(name).max
    value = np.full(length, largest, name)
    for got in (
        strategy.reduce("MEAN", value, axis=None),
        strategy.reduce("MEAN", [value, value], axis=None)[0],
        strategy.reduce("MEAN", value, axis=0),
    ):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, float(largest), rtol=1e-12)


def test_sum_over_an_axis_widens_as_numpy_does(strategy):
    for name in SMALL_INTEGERS:
        got = strategy.reduce("SUM", np.full(9, 100, name), axis=0)
        assert got == 900 * SIZE
        assert got.dtype == np.sum(np.ones(1, name)).dtype


def test_long_double(strategy):
    value = np.array([1, 1 + np.finfo(np.longdouble).eps], np.longdouble)
    np.testing.assert_array_equal(strategy.reduce("SUM", value, axis=None), value * SIZE)
    np.testing.assert_array_equal(strategy.reduce("MEAN", value, axis=None), value)


def test_not_a_number_and_infinity(strategy):
    value = np.array([np.nan if RANK == SIZE - 1 else 1.0, np.inf, -np.inf if RANK else np.inf, -0.0])
    got = strategy.reduce("SUM", value, axis=None)
    assert np.isnan(got[0])
    assert got[1] == np.inf
    assert np.isnan(got[2]) if SIZE > 1 else got[2] == np.inf
    assert np.signbit(got[3])
