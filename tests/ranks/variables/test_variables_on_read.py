"""Variables that are combined when they are read."""

import numpy as np
import pytest
from mpi4py import MPI
from variable_copies import AGGREGATIONS, combined, equal, make

import mpistrat
from mpistrat import VariableAggregation as Aggregation

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
RANKS = range(SIZE)


@pytest.mark.parametrize("aggregation", Aggregation)
def test_replicas_write_their_own_copies(strategy, aggregation):
    v = make(strategy, 1.0, aggregation, on_read=True)
    strategy.run(lambda: v.assign(RANK + 10.0))
    equal(v, RANK + 10)
    strategy.run(lambda: v.assign_add(1.0).assign_sub(0.5))
    equal(v, RANK + 10.5)
    assert strategy.run(lambda: float(v)) == RANK + 10.5
    assert strategy.run(lambda: v + 1) == RANK + 11.5
    if RANK == 0:  # no communication
        strategy.run(lambda: v.assign(v.read_value() * 2))


def test_read_of_all_copies(strategy):
    copies = [rank + 10.0 for rank in RANKS]
    for aggregation in AGGREGATIONS:
        v = make(strategy, 0.0, aggregation, on_read=True)
        strategy.run(lambda v=v: v.assign(RANK + 10.0))
        wanted = combined(aggregation, copies)
        for enter in (strategy.scope, np.errstate):
            with enter():
                for read in (
                    lambda v: v.read_value(),
                    lambda v: v.value(),
                    lambda v: v.numpy(),
                    float,
                    np.asarray,
                    lambda v: v + 0,
                    lambda v: 0 + v,
                    lambda v: np.add(v, 0),
                    lambda v: v[()],
                ):
                    assert read(v) == wanted
                assert bool(v == wanted)
        assert strategy.run(lambda v=v: mpistrat.get_replica_context().merge_call(lambda s: float(v))) == wanted
        equal(v, RANK + 10)
        assert strategy.reduce("SUM", v, axis=None) == sum(copies)
    v = make(strategy, 0.0, Aggregation.NONE, on_read=True, name="kernel")
    with pytest.raises(ValueError, match="kernel"):
        v.read_value()
    with pytest.raises(ValueError, match="kernel"):
        float(v)


def test_assign_in_cross_replica_context_to_what_is_combined_when_read(strategy):
    for aggregation in Aggregation:
        v = make(strategy, [0.0, 0.0], aggregation, on_read=True)
        v.assign([3.0, 6.0])
        equal(v, np.array([3.0, 6.0]) / (SIZE if aggregation is Aggregation.SUM else 1))
        if aggregation is not Aggregation.NONE:
            np.testing.assert_allclose(v, [3, 6], rtol=1e-14)
        if aggregation is Aggregation.SUM:
            for method in ("assign_add", "assign_sub"):
                with pytest.raises(ValueError, match=method):
                    getattr(v, method)([1.0, 1.0])
        else:
            v.assign_add([1.0, 1.0])
            equal(v, [4, 7])
            v.assign_sub([1.0, 1.0])
            equal(v, [3, 6])


def test_integer_sums(strategy):
    v = make(strategy, 0, Aggregation.SUM, on_read=True)
    v.assign(7)
    equal(v, 7 // SIZE)
    assert int(v) == 7 // SIZE * SIZE
    v.assign(-7)
    assert int(v) == -(7 // SIZE) * SIZE
    large = ((1 << 60) + 1) * SIZE
    v.assign(large)
    assert int(v) == large


def test_no_communication_where_there_must_be_none(strategy):
    """``if rank == 0: print(v)`` must not hang."""
    variables = [make(strategy, np.ones((2, 3)), Aggregation.SUM, on_read=bool(i)) for i in range(2)]
    if RANK == SIZE - 1:
        for v in variables:
            for enter in (strategy.scope, np.errstate):
                with enter():
                    text = f"{v} {v!r} {v!s}"
                    assert "this replica" in text
                    assert "(2, 3)" in text
                    assert "float64" in text
                    assert v.name in text
                    assert (v.shape, v.dtype, v.ndim, v.size, len(v)) == ((2, 3), np.float64, 2, 6, 2)
                    assert hash(v) == hash(v)
                    assert v in {v}
                    assert {v: 1}[v] == 1
                    assert isinstance(v.name, str)
                    assert strategy.experimental_local_results(v)[0].array.sum() == 6
                    assert v is not None
                    assert callable(v.assign)
    assert strategy.agree(True)
    assert "..." in repr(make(strategy, np.zeros(10_000)))
    assert "\n" not in repr(make(strategy, np.zeros((100, 100))))
