"""``v[key].assign(value)``: what ``v[key] = value`` does, for each kind of variable; ``v[key]`` stays NumPy's."""

import numpy as np
import pytest
from mpi4py import MPI
from variable_copies import AGGREGATIONS, combined, equal, make, own

import mpistrat
from mpistrat import Variable
from mpistrat import VariableAggregation as Aggregation

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
START = np.arange(12.0).reshape(4, 3)
KEYS = [
    (1, [7.0, 8.0, 9.0]),
    (slice(1, 3), np.full((2, 3), 5.0)),
    ((Ellipsis, 0), 6.0),
    ((2, 1), 4.0),
    ((slice(None, None, -2), slice(0, 2)), [[1.0, 2.0], [3.0, 4.0]]),
    ([0, 3], np.ones((2, 3))),
    (START > 5, 0.0),
]


@pytest.mark.parametrize(("key", "value"), KEYS, ids=[str(key)[:20] for key, _ in KEYS])
def test_writes_as_numpy_does_on_all_copies(strategy, key, value):
    wanted = START.copy()
    wanted[key] = value
    for v in (Variable(START), make(strategy, START), make(strategy, START, Aggregation.SUM)):
        written = v[key].assign(value)  # in an assert, pytest would put v[key] into a name first
        assert written is v
        np.testing.assert_array_equal(own(v) if v.distribute_strategy is strategy else v, wanted)
        v.assign(START)
    own_copy = make(strategy, START)
    strategy.extended.update(own_copy, lambda held: held[key].assign(value))
    equal(own_copy, wanted)


def test_in_run_follows_the_aggregation(strategy):
    for aggregation in (Aggregation.MEAN, Aggregation.ONLY_FIRST_REPLICA):
        v = make(strategy, START, aggregation)
        assert strategy.run(lambda v=v: v[2].assign(RANK + 1.0) is v)
        wanted = START.copy()
        wanted[2] = combined(aggregation, [each + 1.0 for each in range(SIZE)])
        equal(v, wanted)
    for aggregation, words in ((Aggregation.SUM, "assign_add"), (Aggregation.NONE, "aggregation=")):
        v = make(strategy, START, aggregation, name="kernel")
        with pytest.raises(ValueError, match=f"kernel.*{words}"):
            strategy.run(lambda v=v: v[2].assign(1.0))
        equal(v, START)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_on_read_each_replica_writes_its_own(strategy, aggregation):
    v = make(strategy, START, aggregation, on_read=True)
    strategy.run(lambda: v[1:3].assign(RANK + 5.0))
    mine = START.copy()
    mine[1:3] = RANK + 5.0
    equal(v, mine)
    v[0, 0].assign(100.0)
    whole = combined(aggregation, [np.where((START >= 3) & (START < 9), each + 5.0, START) for each in range(SIZE)])
    whole[0, 0] = 100.0
    np.testing.assert_allclose(v, whole, rtol=1e-12)


def test_on_read_without_aggregation_cannot_be_written_outside(strategy):
    v = make(strategy, START, Aggregation.NONE, on_read=True, name="count")
    with pytest.raises(ValueError, match=r"count.*aggregation NONE"):
        v[1].assign(1.0)
    strategy.run(lambda: v[1].assign(RANK))
    assert own(v)[1].tolist() == [RANK] * 3


def test_a_read_communicates_once(strategy):
    v = make(strategy, START, Aggregation.SUM, on_read=True)
    lock = strategy.extended.engine.topology.lock
    before = lock.sequence
    v.read_value()
    one = lock.sequence - before
    assert np.array_equal(v[1], START[1] * SIZE)
    assert lock.sequence - before == 2 * one


def test_wrong_values_change_nothing(strategy):
    v = make(strategy, START, name="kernel")
    for write, error in (
        (lambda: v[1].assign([1.0, 2.0]), ValueError),
        (lambda: v[9].assign(1.0), IndexError),
        (lambda: v[1].assign("x"), (TypeError, ValueError)),
        (lambda: v[1].assign(np.ma.masked_array([1.0, 2.0, 3.0], [True, False, False])), TypeError),
    ):
        with pytest.raises(error):
            write()
        equal(v, START)
    with pytest.raises(RuntimeError, match="kernel"), mpistrat.MirroredStrategy().scope():
        v[1].assign(0.0)
    equal(v, START)


def test_what_is_read_stays_plain(strategy):
    for v in (make(strategy, START), Variable(START), make(strategy, START, Aggregation.SUM, on_read=True)):
        assert type(v[1]) is type(v[1:3]) is np.ndarray
        assert type(v[1, 1]) is np.float64
        part = v[1]
        with pytest.raises(AttributeError, match="assign"):
            part.assign(1.0)
        with pytest.raises(ValueError, match="read-only"):
            part[0] = 1.0
