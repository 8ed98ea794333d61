"""Tests of lists in a reduction over an axis: one array, as in a dataset. Without an axis, a structure."""

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


@pytest.fixture
def strategy():
    return mpistrat.MultiWorkerMirroredStrategy()


@pytest.mark.parametrize("rows", [[1, 2], [[1, 2], [3, 4], [5, 6]], [np.array([1, 2]), np.array([3, 4])]])
def test_a_list_with_an_axis_is_one_array(strategy, rows):
    values = np.array(rows) + RANK
    everyone = np.concatenate([np.array(rows) + rank for rank in range(SIZE)])
    assert strategy.reduce("SUM", values.tolist(), axis=0) == pytest.approx(everyone.sum(axis=0))
    assert strategy.reduce("MEAN", list(values), axis=0) == pytest.approx(everyone.mean(axis=0))
    assert mpistrat.get_strategy().reduce("SUM", rows, axis=0) == pytest.approx(np.sum(rows, axis=0))


def test_lists_of_other_lengths_on_other_ranks(strategy):
    assert strategy.reduce("SUM", [1.0] * RANK, axis=0) == sum(range(SIZE))


def test_a_list_without_an_axis_is_a_structure(strategy):
    assert strategy.reduce("SUM", [1, RANK], axis=None) == [SIZE, sum(range(SIZE))]


def test_structures_with_an_axis_are_refused(strategy):
    for structure in ((1, 2), {"a": [1, 2]}):
        with pytest.raises(TypeError, match="not a structure"):
            strategy.reduce("SUM", structure, axis=0)
    with pytest.raises(ValueError, match="one array"):
        strategy.reduce("SUM", [[1, 2], [3]], axis=0)
    assert strategy.reduce("SUM", 1, axis=None) == SIZE  # the ranks are still in step


def test_scatter_of_a_list_says_how_to_divide_it(strategy):
    names = [f"part-{i}.csv" for i in range(7)]
    with pytest.raises(ValueError, match=r"numpy\.array\(the list\)"):
        strategy.scatter(names)
    gathered = strategy.gather_object(strategy.scatter(np.array(names)).tolist())
    assert [name for part in gathered for name in part] == names
