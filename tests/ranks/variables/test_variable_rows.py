"""Writing to rows of variables: the scatter methods."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from variable_copies import equal, make, own

from mpistrat import IndexedSlices, Variable
from mpistrat import VariableAggregation as Aggregation

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
RANKS = range(SIZE)


ROWS = IndexedSlices([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [0, 2, 0])
SCATTERS = {
    "scatter_add": [[7, 9], [1, 1], [4, 5]],
    "scatter_sub": [[-5, -7], [1, 1], [-2, -3]],
    "scatter_mul": [[5, 12], [1, 1], [3, 4]],
    "scatter_div": [[1 / 5, 1 / 12], [1, 1], [1 / 3, 1 / 4]],
    "scatter_min": [[1, 1], [1, 1], [1, 1]],
    "scatter_max": [[5, 6], [1, 1], [3, 4]],
    "scatter_update": [[5, 6], [1, 1], [3, 4]],
}


@pytest.mark.parametrize("method", SCATTERS)
@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16"])
def test_scatter(strategy, method, name):
    dtype = getattr(ml_dtypes, name) if name == "bfloat16" else name
    wanted = np.array(SCATTERS[method])
    rtol = {"float64": 1e-12, "float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}[name]
    for v in (
        Variable(np.ones((3, 2), dtype)),
        make(strategy, np.ones((3, 2), dtype)),
        make(strategy, np.ones((3, 2), dtype), Aggregation.SUM),
    ):
        assert getattr(v, method)(ROWS) is v
        np.testing.assert_allclose(v.read_value().astype(float), wanted, rtol=rtol)
    v = make(strategy, np.ones((3, 2), dtype), on_read=True, aggregation=Aggregation.SUM)
    strategy.run(lambda: getattr(v, method)(ROWS))
    np.testing.assert_allclose(own(v).astype(float), wanted, rtol=rtol)
    v = make(strategy, np.ones((3, 2), dtype), Aggregation.ONLY_FIRST_REPLICA)
    mine = ROWS if RANK == 0 else IndexedSlices(np.zeros((RANK, 2)), [1] * RANK)
    strategy.run(lambda: getattr(v, method)(mine))
    np.testing.assert_allclose(own(v).astype(float), wanted, rtol=rtol)


@pytest.mark.parametrize("aggregation", [Aggregation.SUM, Aggregation.MEAN])
def test_scatter_add_of_all_replicas(strategy, aggregation):
    v = make(strategy, np.zeros((SIZE + 1, 2)), aggregation)
    mine = IndexedSlices(np.full((2, 2), RANK + 1.0), [RANK, SIZE])
    wanted = np.zeros((SIZE + 1, 2))
    for rank in RANKS:
        wanted[rank] += rank + 1.0
        wanted[SIZE] += rank + 1.0
    if aggregation is Aggregation.MEAN:
        wanted /= SIZE
    strategy.run(lambda: v.scatter_add(mine))
    np.testing.assert_allclose(own(v), wanted)
    strategy.run(lambda: v.scatter_sub(mine))
    np.testing.assert_allclose(own(v), 0, atol=1e-12)


@pytest.mark.parametrize("aggregation", [Aggregation.SUM, Aggregation.MEAN])
@pytest.mark.parametrize("method", ["scatter_min", "scatter_max", "scatter_update"])
def test_scatters_that_cannot_be_added_up(strategy, aggregation, method):
    """The replicas' rows have no sum or mean here: the last replica's must not win silently."""
    v = make(strategy, np.ones((3, 2)), aggregation)
    with pytest.raises(NotImplementedError):
        strategy.run(lambda: getattr(v, method)(ROWS))
    equal(v, np.ones((3, 2)))


def test_scatter_what_does_not_fit(strategy):
    for v in (make(strategy, np.ones((3, 2))), Variable(np.ones((3, 2)))):
        for wrong, error in [
            (np.ones((3, 2)), TypeError),
            (IndexedSlices(np.ones((1, 3)), [0]), ValueError),
            (IndexedSlices(np.ones(1), [0]), ValueError),
            (IndexedSlices(np.ones((1, 2)), [3]), ValueError),
            (IndexedSlices(np.ones((1, 2)), [-1]), ValueError),
            (IndexedSlices(np.ones((1, 2), complex), [0]), TypeError),
        ]:
            for method in SCATTERS:
                with pytest.raises(error):
                    getattr(v, method)(wrong)
        np.testing.assert_array_equal(v, np.ones((3, 2)))
        v.scatter_add(IndexedSlices(np.ones((0, 2)), []))
    with pytest.raises(ValueError):
        Variable(1.0).scatter_add(IndexedSlices([1.0], [0]))
    integers = Variable([6, 7])
    integers.scatter_div(IndexedSlices([2, 2], [0, 1]))
    np.testing.assert_array_equal(integers, [3, 3])
    with pytest.raises(TypeError):
        integers.scatter_add(IndexedSlices([0.5], [0]))


def test_scatter_of_a_variable_that_is_combined_when_read(strategy):
    v = make(strategy, np.ones((3, 2)), Aggregation.SUM, on_read=True, name="kernel")
    for method in SCATTERS:
        for enter in (strategy.scope, np.errstate):
            with enter(), pytest.raises(ValueError, match="kernel"):
                getattr(v, method)(ROWS)
    equal(v, np.ones((3, 2)))
