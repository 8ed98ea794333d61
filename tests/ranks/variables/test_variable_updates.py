"""Changing the copy of each replica: update and update_non_slot."""

import numpy as np
import pytest
from mpi4py import MPI
from variable_copies import equal, make

import mpistrat
from mpistrat import PerReplica, Variable
from mpistrat import VariableAggregation as Aggregation
from mpistrat.variables import LocalVariable

RANK = MPI.COMM_WORLD.rank


def test_update_touches_this_copy_only(strategy):
    for v in (make(strategy, 1.0), make(strategy, 1.0, Aggregation.SUM), make(strategy, 1.0, on_read=True)):

        def fn(component, value, factor=1, v=v):
            assert isinstance(component, LocalVariable)
            assert mpistrat.get_replica_context() is None
            assert mpistrat.in_cross_replica_context()
            component.assign_add(value * factor)
            v.assign_add(0.5)  # the variable itself: its component here
            return float(component)

        with strategy.scope():
            result = strategy.extended.update(v, fn, args=(PerReplica((RANK + 1.0,)),), kwargs={"factor": 2})
        assert isinstance(result, mpistrat.Mirrored)
        assert result.values == (2 * RANK + 3.5,)
        equal(v, 2 * RANK + 3.5)
        assert strategy.extended.update(v, lambda x: 3, group=False) == (3,)
        assert strategy.run(lambda v=v: strategy.extended.update(v, lambda x: 4, group=False)) == (4,)
        assert strategy.extended.update(v, lambda x: None).values == (None,)


def test_update_passes_distributed_arguments(strategy):
    v, w = make(strategy, 1.0), make(strategy, [5.0, 6.0])
    seen = []
    value = PerReplica((RANK,))
    args = (value, [value, {"a": value}], w, None, "x")
    strategy.extended.update(v, lambda *got, **kwargs: seen.append((got, kwargs)), args, {"k": (value,)})
    (((_, first, second, third, fourth, fifth), kwargs),) = seen
    assert first == RANK
    assert second == [RANK, {"a": RANK}]
    assert third is strategy.experimental_local_results(w)[0]
    assert fourth is None
    assert fifth == "x"
    assert kwargs == {"k": (RANK,)}


def test_update_of_what_is_no_variable(strategy):
    other = mpistrat.MirroredStrategy()
    v = make(strategy, [1.0, 2.0])
    for wrong, error in [(1.0, TypeError), (None, TypeError), (np.ones(1), TypeError), (make(other), ValueError)]:
        with pytest.raises(error):
            strategy.extended.update(wrong, lambda x: x)
    with pytest.raises(ValueError):
        strategy.extended.update(Variable(1.0), lambda x: x)
    with other.scope(), pytest.raises(RuntimeError):
        strategy.extended.update(v, lambda x: x)
    (component,) = strategy.experimental_local_results(v)
    assert strategy.extended.update(component, lambda x: 1, group=False) == (1,)


def test_update_leaves_its_context_after_an_error(strategy):
    v = make(strategy)
    for call in (
        lambda: strategy.extended.update(v, lambda x: 1 / 0),
        lambda: strategy.extended.update_non_slot(None, lambda: 1 / 0),
    ):
        with pytest.raises(ZeroDivisionError):
            call()
        assert not mpistrat.has_strategy()
        with strategy.scope():
            with pytest.raises(ZeroDivisionError):
                call()
            assert mpistrat.in_cross_replica_context()
            assert mpistrat.get_strategy() is strategy


def test_update_non_slot(strategy):
    extended = strategy.extended
    assert extended.update_non_slot(None, lambda x: x + 1, (PerReplica((RANK,)),)).values == (RANK + 1,)
    assert extended.update_non_slot(None, lambda x: x, (1,), group=False) == (1,)
    with pytest.raises(RuntimeError, match="merge_call"):
        strategy.run(lambda: extended.update_non_slot(None, lambda: 1))
