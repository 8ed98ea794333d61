"""A metric that was created outside of a scope does not pass off one rank's values as those of all ranks."""

import contextlib
import warnings

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat import metrics

MAKE = [metrics.Accuracy, metrics.Mean, metrics.MeanSquaredError, metrics.Sum, metrics.AUC]


def warned():
    """What the creation of a metric outside of scopes does on this rank: rank 0 of several ranks warns."""
    if MPI.COMM_WORLD.size > 1 and MPI.COMM_WORLD.rank == 0:
        return pytest.warns(RuntimeWarning, match="counts the values of one rank")
    return contextlib.nullcontext()


@pytest.mark.parametrize("make", MAKE)
def test_a_metric_outside_of_scopes_is_refused_in_run(strategy, make):
    with warned():
        metric = make()
    arguments = (np.zeros(2), np.zeros(2))[: 1 if make in (metrics.Mean, metrics.Sum) else 2]
    with pytest.raises(ValueError, match=f"the metric '{metric.name}' was created outside of the strategy's scope"):
        strategy.run(metric.update_state, args=arguments)
    with strategy.scope():
        made = make()
    strategy.run(made.update_state, args=arguments)
    made.result()


def test_a_metric_of_one_rank_is_made_in_the_scope_of_one_device():
    rank = MPI.COMM_WORLD.rank
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with mpistrat.OneDeviceStrategy("cpu:0").scope():
            metric = metrics.Mean()
            metric.update_state([float(rank)])
            assert metric.result() == rank


def test_the_default_strategy_runs_its_own_metrics():
    default = mpistrat.get_strategy()
    with default.scope(), warned():
        metric = metrics.Mean()
    default.run(lambda: metric.update_state(5.0))
    assert metric.result() == 5
