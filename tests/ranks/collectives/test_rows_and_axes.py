"""Sparse rows, reductions over axes, and gathering."""

import ml_dtypes
import numpy as np
import pytest
from every_way import ALL_OPS, SUM_OF_RANKS, all_reduce, rows_of, ways
from mpi4py import MPI

import mpistrat

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


# --- sparse rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_ops", ALL_OPS)
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_sparse_rows(with_ops, op):
    strategy = mpistrat.MirroredStrategy(cross_device_ops=ALL_OPS[with_ops]())
    mine = rows_of(RANK)
    wanted = sum(rows_of(rank).to_dense() for rank in range(SIZE)) / (SIZE if op == "MEAN" else 1)
    for way in ways(strategy, op, mine):
        got = way()
        assert isinstance(got, mpistrat.IndexedSlices)
        assert got.dense_shape == (4, 2)
        np.testing.assert_allclose(got.to_dense(), wanted)
    dense, sparse, number = all_reduce(strategy, op, [np.full(3, 1.0), mine, 1.0])
    np.testing.assert_allclose(sparse.to_dense(), wanted)
    assert (dense == number).all()
    np.testing.assert_array_equal(mine.to_dense(), rows_of(RANK).to_dense())


@pytest.mark.parametrize("name", ["int8", "int16", "int32", "float16", "uint8", "bfloat16"])
def test_mean_of_sparse_rows_has_the_precision_of_the_dense_one(strategy, name):
    dtype = np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name)
    dense = np.full((1, 1), 100, dtype)
    got = strategy.reduce("MEAN", mpistrat.IndexedSlices(dense, [0], (1, 1)), axis=None)
    assert got.dtype == strategy.reduce("MEAN", dense, axis=None).dtype
    each = 100 / SIZE if dtype.kind in "iu" else float(np.float32(100 / SIZE).astype(dtype))
    np.testing.assert_allclose(np.asarray(got.values, np.float64), each, rtol=1e-12)


def test_sparse_rows_that_do_not_fit(strategy, in_step):
    with pytest.raises(TypeError, match="bool"):
        strategy.reduce("SUM", mpistrat.IndexedSlices(np.ones((1, 2), bool), [0]), axis=None)
    with pytest.raises(NotImplementedError):
        strategy.gather(rows_of(RANK), 0)
    with pytest.raises(NotImplementedError):
        strategy.run(lambda: mpistrat.get_replica_context().all_gather([rows_of(RANK)], 0))
    with pytest.raises(TypeError):
        strategy.reduce("SUM", rows_of(RANK), axis=0)
    with pytest.raises(TypeError):
        strategy.extended.broadcast_to(rows_of(RANK), "cpu:0")
    if SIZE > 1:
        for wrong in (
            mpistrat.IndexedSlices(np.ones((1, 2 + RANK)), [0]),
            mpistrat.IndexedSlices(np.ones((1, 2)), [0], (4 + RANK, 2)),
            mpistrat.IndexedSlices(np.ones((1, 2), [np.float32, float][RANK % 2]), [0]),
        ):
            with pytest.raises(ValueError, match=r"ranks? [\d, -]*1"):
                strategy.reduce("SUM", wrong, axis=None)


# --- axes ----------------------------------------------------------------------------------------------


def test_mean_over_examples_not_over_replicas(strategy):
    value = np.arange(RANK + 1, dtype=float)  # rank r has r + 1 examples
    every = np.concatenate([np.arange(rank + 1) for rank in range(SIZE)])
    assert strategy.reduce("MEAN", value, axis=0) == pytest.approx(every.mean())
    assert strategy.reduce("MEAN", np.array([1.0, 2, 3] if RANK == 0 else [5.0] * (RANK == 1)), axis=0) == (
        2.75 if SIZE > 1 else 2
    )


def test_replica_without_examples(strategy):
    value = np.full((0 if RANK == SIZE - 1 else 2, 3), 4.0)
    got = strategy.reduce("MEAN", value, axis=0)
    if SIZE == 1:
        assert np.isnan(got).all()
    else:
        np.testing.assert_array_equal(got, [4, 4, 4])
    np.testing.assert_array_equal(strategy.reduce("SUM", value, axis=0), [8.0 * (SIZE - 1)] * 3)
    assert np.isnan(strategy.reduce("MEAN", np.ones(0), axis=0))
    assert np.isnan(strategy.reduce("MEAN", np.ones(0, int), axis=0))
    assert strategy.reduce("SUM", np.ones(0), axis=0) == 0


def test_axes_that_are_wrong(strategy, in_step):
    value = np.ones((2, 3))
    for op in ("SUM", "MEAN"):
        for axis in ([0], [0, 1], 0.5, "0", (0.0,), {0}):
            with pytest.raises(TypeError):
                strategy.reduce(op, value, axis=axis)
        for axis in (2, -3, (0, 2), (0, 0), (0, -2)):
            with pytest.raises(ValueError):
                strategy.reduce(op, value, axis=axis)
        with pytest.raises(ValueError):
            strategy.reduce(op, 1.0, axis=0)
        for nested in ({"a": value}, (value,), None):
            with pytest.raises(TypeError, match="structure"):
                strategy.reduce(op, nested, axis=0)


def test_axis_of_distributed_values(strategy):
    value = mpistrat.PerReplica((np.full(RANK + 1, 2),))
    assert strategy.reduce("MEAN", value, axis=0) == 2
    assert strategy.reduce("SUM", value, axis=0) == 2 * (SUM_OF_RANKS + SIZE)
    assert strategy.reduce("MEAN", value, axis=0).dtype == np.float64


# --- gathering -----------------------------------------------------------------------------------------


def test_gather_structures(strategy):
    value = {"a": np.full(RANK, RANK), "b": [np.full((1, 2), "x"), None]}
    wanted = [rank for rank in range(SIZE) for _ in range(rank)]
    for got in (
        strategy.gather(value, 0),
        strategy.run(lambda: mpistrat.get_replica_context().all_gather(value, axis=0)),
    ):
        assert got["a"].tolist() == wanted
        assert got["b"][0].tolist() == [["x", "x"]] * SIZE
        assert got["b"][1] is None
    assert strategy.gather(mpistrat.PerReplica((np.array([RANK]),)), 0).tolist() == list(range(SIZE))


def test_gather_what_cannot_be(strategy, in_step):
    for value, axis, error in [
        (1.0, 0, ValueError),
        (np.array(1.0), 0, ValueError),
        (np.ones(2), 1, ValueError),
        (np.ones(2), -2, ValueError),
        (np.ones(2), 0.0, TypeError),
        (np.ones(2), None, TypeError),
        (np.ones(2), (0,), TypeError),
        (np.array([None]), 0, TypeError),
    ]:
        with pytest.raises(error):
            strategy.gather(value, axis)
        with pytest.raises(error):
            strategy.run(lambda value=value, axis=axis: mpistrat.get_replica_context().all_gather(value, axis))


@pytest.mark.ranks(min=2)
def test_gather_of_shapes_that_do_not_fit(strategy, in_step):
    for value, axis in [
        (np.ones((2, 2 + RANK)), 0),
        (np.ones((2 + RANK, 2)), 1),
        (np.ones((2,) * (1 + RANK % 2)), 0),
        (np.ones(2, [np.float32, np.float64][RANK % 2]), 0),
        (np.ones((2, 2)), RANK % 2),
    ]:
        with pytest.raises(ValueError, match=r"ranks? [\d, -]*1"):
            strategy.gather(value, axis)
