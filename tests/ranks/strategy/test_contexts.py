"""Which strategy is current, in which context, and what may be called where."""

import copy
import dataclasses
import threading
import warnings

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat import (
    Mirrored,
    PerReplica,
    Variable,
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from mpistrat import context as modes

# The calls are meant to be those of the default strategy.
OF_ONE_REPLICA = pytest.mark.filterwarnings("ignore:.*outside of `strategy.run`:RuntimeWarning")
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


@pytest.fixture
def other():
    return mpistrat.MirroredStrategy()


@pytest.fixture(autouse=True)
def leaves_nothing_behind():
    yield
    depth = len(modes.stack())
    modes.stack().clear()
    assert depth == 0


@pytest.fixture
def default():
    return get_strategy()


def state():
    """All that can be asked about the current context."""
    replica = get_replica_context()
    return get_strategy(), has_strategy(), in_cross_replica_context(), replica


def in_scope(strategy):
    return strategy, True, True, None


# --- the stack -----------------------------------------------------------------------------------------


@OF_ONE_REPLICA
def test_the_default_strategy_gives_values_back(default):
    """Also what no other could reduce, and arrays in memory of their own."""
    for value in (np.ones(3), np.array([True]), [np.ones(2), 1.0], "text"):
        for result in (
            default.gather(value, 0),
            default.reduce("SUM", value, axis=None),
            get_replica_context().all_reduce("SUM", value),
        ):
            assert type(result) is type(value)
            for given, got in zip(value, result, strict=True):
                np.testing.assert_array_equal(given, got)
            assert result is not value or value == "text"


def test_default_mode(default):
    strategy, has, cross, replica = state()
    assert strategy is default
    assert not has
    assert not cross
    assert replica is not None
    assert replica.replica_id_in_sync_group == 0
    assert replica.num_replicas_in_sync == 1
    assert replica.strategy is default


def test_scope(strategy):
    before = state()
    with strategy.scope() as entered:
        assert entered is strategy
        assert state() == in_scope(strategy)
        with strategy.scope() as again:
            assert again is strategy
            assert state() == in_scope(strategy)
        assert state() == in_scope(strategy)
    assert state() == before


def test_scope_that_is_kept(strategy, other):
    scope, before = strategy.scope(), state()
    for _ in range(3):
        with scope:
            assert get_strategy() is strategy
            with scope, scope:
                assert get_strategy() is strategy
            assert get_strategy() is strategy
        assert state() == before
    with other.scope():
        with pytest.raises(RuntimeError, match="Mixing"):
            scope.__enter__()
        assert get_strategy() is other
    with scope:
        pass


def test_another_strategys_scope(strategy, other):
    with strategy.scope():
        with pytest.raises(RuntimeError, match="Mixing different"), other.scope():
            pass
        assert state() == in_scope(strategy)
    with other.scope():
        assert get_strategy() is other


def test_scope_in_replica_context(strategy, other):
    def fn():
        for wrong in (strategy, other):
            with pytest.raises(RuntimeError, match=r"cross-replica context|Mixing"):
                wrong.scope().__enter__()
        with pytest.raises(RuntimeError, match="merge_call"):
            strategy.scope().__enter__()
        assert get_replica_context() is not None
        return state()

    assert strategy.run(fn)[0] is strategy


def test_run(strategy, default):
    seen = []

    def fn():
        seen.append(state())
        return get_replica_context().replica_id_in_sync_group

    assert strategy.run(fn) == RANK
    with strategy.scope():
        assert strategy.run(fn) == RANK
        assert state() == in_scope(strategy)
    for current, has, cross, replica in seen:
        assert current is strategy
        assert has
        assert not cross
        assert isinstance(replica, mpistrat.ReplicaContext)
        assert replica.strategy is strategy
        assert replica.num_replicas_in_sync == SIZE
        assert int(replica.replica_id_in_sync_group) == RANK
    assert get_strategy() is default


def test_run_where_it_may_not_be(strategy, other):
    with other.scope(), pytest.raises(RuntimeError, match="Mixing"):
        strategy.run(lambda: None)
    with pytest.raises(RuntimeError, match="cross-replica context"):
        strategy.run(lambda: strategy.run(lambda: None))
    with pytest.raises(RuntimeError, match="Mixing"):
        strategy.run(lambda: other.run(lambda: None))
    assert strategy.run(lambda: get_replica_context().merge_call(lambda s: s.run(lambda: 5))) == 5
    for wrong in ("ab", 1, None, {"a": 1}, np.ones(2), iter([1])):
        with pytest.raises(ValueError, match="args"):
            strategy.run(lambda *args: None, args=wrong)


@dataclasses.dataclass
class Progress:
    steps: int

    def __post_init__(self):
        self.seen = []


def test_arguments_without_distributed_values_are_handed_over_themselves(strategy):
    """What the function changes in them is changed."""
    progress, rows, found = Progress(0), [], {"deep": [{}]}

    def step(progress, rows, found):
        progress.steps += 1
        progress.seen.append(RANK)
        rows.append(RANK)
        found["deep"][0]["rank"] = RANK
        return get_replica_context().merge_call(lambda strategy, value: value, args=(progress,))

    assert strategy.run(step, args=(progress, rows), kwargs={"found": found}) is progress
    assert (progress.steps, progress.seen, rows) == (1, [RANK], [RANK])
    assert found == {"deep": [{"rank": RANK}]}
    strategy.extended.update_non_slot(None, lambda rows: rows.append(1), args=(rows,))
    assert rows == [RANK, 1]


def test_arguments_and_results_of_run(strategy):
    with strategy.scope():
        v = Variable(1.0)
        w = Variable(1.0, synchronization=mpistrat.VariableSynchronization.ON_READ)
    seen = []

    def fn(*args, **kwargs):
        seen.append((args, kwargs))
        return args

    data = object()
    one = PerReplica((RANK,))
    result = strategy.run(
        fn,
        args=[one, [one, {"a": one, "b": (one, None)}], v, w, Mirrored((3,)), data, None, "x", 5, []],
        kwargs={"k": one, "v": v, "n": None},
    )
    ((args, kwargs),) = seen
    assert args[:2] == (RANK, [RANK, {"a": RANK, "b": (RANK, None)}])
    assert args[2] is v
    assert args[3] is w
    assert args[4:] == (3, data, None, "x", 5, [])
    assert kwargs == {"k": RANK, "v": v, "n": None} if v is kwargs["v"] else False
    assert result is args
    assert strategy.run(lambda: one) is one or strategy.run(lambda: one) == RANK
    assert strategy.run(lambda: None) is None
    assert strategy.run(lambda: v) is v
    assert strategy.run(lambda a, b=2: (a, b), (1,), {"b": 3}) == (1, 3)
    assert strategy.run(lambda: 1, options=mpistrat.RunOptions()) == 1
    assert strategy.extended.call_for_each_replica(lambda x: x, (one,)) == RANK


def test_merge_call(strategy):
    def merge_fn(got, *args, **kwargs):
        assert got is strategy
        assert state() == in_scope(strategy)
        return args, kwargs

    def fn():
        replica, before = get_replica_context(), state()
        assert replica.merge_call(merge_fn) == ((), {})
        assert replica.merge_call(merge_fn, (1, [2]), {"a": 3}) == ((1, [2]), {"a": 3})
        assert replica.merge_call(lambda s: PerReplica((RANK,))) == RANK
        assert replica.merge_call(lambda s: [Mirrored((5,)), None]) == [5, None]
        assert replica.merge_call(lambda s: s.reduce("SUM", 1, axis=None)) == SIZE
        assert state() == before
        nested = replica.merge_call(lambda s: s.run(lambda: get_replica_context().merge_call(lambda s: 7)))
        assert nested == 7
        assert state() == before
        return True

    assert strategy.run(fn)


def test_calls_that_belong_into_replica_context(strategy, other, default):
    kept = []
    strategy.run(lambda: kept.append(get_replica_context()))
    (replica,) = kept
    calls = [
        lambda: replica.merge_call(lambda s: None),
        lambda: replica.all_reduce("SUM", 1.0),
        lambda: replica.all_gather(np.ones(1), 0),
        lambda: replica.devices,
    ]
    for call in calls:
        with strategy.scope(), pytest.raises(RuntimeError, match="call_for_each_replica"):
            call()
        with pytest.raises(RuntimeError, match=r"Mismatching tf\.distribute\.Strategy"):
            call()  # the default strategy is current
        with pytest.raises(RuntimeError, match=r"Mismatching tf\.distribute\.Strategy"):
            other.run(call)
        with pytest.raises(RuntimeError, match="call_for_each_replica"):
            strategy.run(lambda call=call: get_replica_context().merge_call(lambda s: call()))
    with pytest.raises(RuntimeError, match="Mismatching ReplicaContext"):
        strategy.run(lambda: mpistrat.ReplicaContext(strategy, RANK).merge_call(lambda s: None))
    default_replica = default_context()
    with pytest.raises(RuntimeError, match="Mismatching"):
        strategy.run(lambda: default_replica.merge_call(lambda s: None))
    assert replica.replica_id_in_sync_group == RANK
    assert replica.num_replicas_in_sync == SIZE
    assert replica.strategy is strategy
    assert strategy.run(lambda: get_replica_context().devices) == ("cpu:0",)


def default_context():
    return get_replica_context()


def test_collectives_outside_of_run_warn_once_at_each_line(strategy, default):
    calls = (
        lambda: default_context().all_reduce("SUM", 1.0),
        lambda: default_context().all_gather(np.ones(1), 0),
        lambda: default_context().merge_call(lambda strategy: None),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        default_context()
        for call in calls:
            default.run(call)
        assert caught == []
        for _ in range(3):
            for call in calls:
                call()
    told = [str(each.message).split()[0] for each in caught]
    assert told == (["all_reduce", "all_gather", "merge_call"] if SIZE > 1 and RANK == 0 else [])
    assert all(each.filename == __file__ and "`strategy.run`" in str(each.message) for each in caught)


CROSS_REPLICA_ONLY = {
    "reduce": lambda s: s.reduce("SUM", 1.0, axis=None),
    "reduce over an axis": lambda s: s.reduce("SUM", np.ones(2), axis=0),
    "gather": lambda s: s.gather(np.ones(1), 0),
    "reduce_to": lambda s: s.extended.reduce_to("SUM", 1.0, "cpu:0"),
    "batch_reduce_to": lambda s: s.extended.batch_reduce_to("SUM", [(1.0, "cpu:0")]),
    "broadcast_to": lambda s: s.extended.broadcast_to(1.0, "cpu:0"),
    "update_non_slot": lambda s: s.extended.update_non_slot(None, lambda: None),
    "call_for_each_replica": lambda s: s.extended.call_for_each_replica(lambda: None),
    "values_from_function": lambda s: s.experimental_distribute_values_from_function(lambda c: 1),
}


@pytest.mark.parametrize("name", CROSS_REPLICA_ONLY)
def test_calls_that_belong_into_cross_replica_context(strategy, other, name):
    call = CROSS_REPLICA_ONLY[name]
    call(strategy)
    with strategy.scope():
        call(strategy)
    with other.scope(), pytest.raises(RuntimeError, match="Mixing"):
        call(strategy)
    with pytest.raises(RuntimeError, match="Mixing"):
        other.run(lambda: call(strategy))
    with pytest.raises(RuntimeError, match="cross-replica context"):
        strategy.run(lambda: call(strategy))
    strategy.run(lambda: get_replica_context().merge_call(call))
    if name in ("reduce", "reduce_to", "batch_reduce_to", "reduce over an axis"):
        with pytest.raises(RuntimeError, match="all_reduce"):
            strategy.run(lambda: call(strategy))
    if name == "gather":
        with pytest.raises(RuntimeError, match="all_gather"):
            strategy.run(lambda: call(strategy))
    assert strategy.agree(True)


def test_calls_that_need_the_scope(strategy, other):
    with strategy.scope():
        v = Variable(1.0)
    extended = strategy.extended
    with pytest.raises(RuntimeError, match=r"strategy\.scope\(\)"):
        extended.colocate_vars_with(v)
    with other.scope(), pytest.raises(RuntimeError, match="Mixing"):
        extended.colocate_vars_with(v)
    with strategy.scope():
        with extended.colocate_vars_with(v):
            assert Variable(2.0).distribute_strategy is strategy
        with pytest.raises(ValueError, match="colocate_vars_with"):
            extended.colocate_vars_with(foreign(other))
        with pytest.raises(TypeError):
            extended.colocate_vars_with(1.0)


def foreign(strategy):
    stack = list(modes.stack())
    modes.stack().clear()
    try:
        with strategy.scope():
            return Variable(1.0)
    finally:
        modes.stack().extend(stack)


def test_per_replica_values_outside_of_replica_context(strategy):
    value = PerReplica((np.ones(2),))
    for enter in (strategy.scope, np.errstate):
        with enter():
            with pytest.raises(ValueError, match="PerReplica object while not inside a replica context"):
                np.asarray(value)
            for wrong in (
                lambda: value + 1,
                lambda: 1 + value,
                lambda: -value,
                lambda: value * value,
                lambda: value[0],
                lambda: float(value),
                lambda: len(value),
            ):
                with pytest.raises(TypeError):
                    wrong()
            assert "PerReplica:{\n  0:" in repr(value)
            assert strategy.experimental_local_results(value)[0] is value.values[0]
    inside = strategy.run(lambda: np.asarray(value))
    np.testing.assert_array_equal(inside, [1, 1])
    with strategy.scope():
        v = Variable(0.0)
    np.testing.assert_array_equal(strategy.extended.update(v, lambda x: np.asarray(value)).values[0], [1, 1])


def test_per_replica_values_are_copied_as_asked():
    value = PerReplica((np.ones(2),))

    def fn():
        assert np.asarray(value) is value.values[0]
        assert not np.shares_memory(np.array(value), value.values[0])
        assert value.__array__(copy=False) is value.values[0]
        assert np.asarray(value, np.float32).dtype == np.float32
        assert np.asarray(PerReplica((RANK + 0.5,))) == RANK + 0.5
        for impossible in (
            lambda: value.__array__(np.float32, False),
            lambda: PerReplica((1.0,)).__array__(copy=False),
        ):
            with pytest.raises(ValueError, match="a copy is needed"):
                impossible()

    mpistrat.MultiWorkerMirroredStrategy().run(fn)


# --- errors leave the stack as it was ------------------------------------------------------------------


class OfTheTest(Exception):
    pass


def fail(*args, **kwargs):
    raise OfTheTest


@OF_ONE_REPLICA
def test_errors_restore_the_context(strategy):
    with strategy.scope():
        v = Variable(1.0)
    before = state()

    def nested():
        inside = state()
        for call in (
            lambda: get_replica_context().merge_call(fail),
            lambda: get_replica_context().merge_call(lambda s: s.run(fail)),
            lambda: get_replica_context().merge_call(lambda s: s.extended.update(v, fail)),
            lambda: strategy.extended.update(v, fail),
        ):
            with pytest.raises(OfTheTest):
                call()
            assert state() == inside
        fail()

    def enter():
        with strategy.scope(), strategy.scope():
            fail()

    for call in (
        enter,
        nested_run := lambda: strategy.run(nested),
        lambda: strategy.run(fail),
        lambda: strategy.extended.update(v, fail),
        lambda: strategy.extended.update_non_slot(None, fail),
        lambda: strategy.experimental_distribute_values_from_function(fail),
        lambda: get_replica_context().merge_call(fail),
        lambda: get_strategy().run(fail),
    ):
        with pytest.raises(OfTheTest):
            call()
        assert state() == before
    with strategy.scope():
        for call in (enter, nested_run, lambda: strategy.extended.update(v, fail)):
            with pytest.raises(OfTheTest):
                call()
            assert state() == in_scope(strategy)
    with pytest.raises(OfTheTest), strategy.scope():
        Variable(fail)
    assert state() == before


def test_generators_and_exit_exceptions(strategy):
    before = state()
    for error in (KeyboardInterrupt, SystemExit, GeneratorExit):

        def leave(error=error):
            raise error

        with pytest.raises(error):
            strategy.run(leave)
        with pytest.raises(error), strategy.scope():
            leave()
        assert state() == before


# --- threads -------------------------------------------------------------------------------------------


def in_thread(fn):
    result = []

    def run():
        try:
            result.append(fn())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


def test_every_thread_has_its_own_stack(strategy, other, default):
    with strategy.scope():
        assert in_thread(get_strategy) is default
        assert not in_thread(has_strategy)

        def enter_other():
            with other.scope():
                return get_strategy()

        assert in_thread(enter_other) is other
        assert get_strategy() is strategy
        assert in_thread(lambda: strategy.run(lambda: get_strategy())) is strategy
        in_thread(lambda: experimental_set_strategy(other))
        assert get_strategy() is strategy

    def both():
        barrier, seen = threading.Barrier(2, timeout=250), {}

        def run(one):
            with one.scope():
                barrier.wait()
                seen[one] = get_strategy()
                barrier.wait()

        threads = [threading.Thread(target=run, args=(each,)) for each in (strategy, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return seen

    assert both() == {strategy: strategy, other: other}


# --- setting -------------------------------------------------------------------------------------------


def test_set_strategy(strategy, other, default):
    try:
        experimental_set_strategy(strategy)
        assert state() == in_scope(strategy)
        assert strategy.run(lambda: get_replica_context().replica_id_in_sync_group) == RANK
        with strategy.scope():
            assert get_strategy() is strategy
            for wrong in (other, None, strategy):
                with pytest.raises(RuntimeError, match="scope"):
                    experimental_set_strategy(wrong)
            assert state() == in_scope(strategy)
        with pytest.raises(RuntimeError, match="Mixing"), other.scope():
            pass
        experimental_set_strategy(other)
        assert get_strategy() is other
        with pytest.raises(RuntimeError):
            other.run(lambda: experimental_set_strategy(None))
        assert get_strategy() is other
    finally:
        experimental_set_strategy(None)
    assert get_strategy() is default
    experimental_set_strategy(None)
    experimental_set_strategy(default)
    assert get_strategy() is default
    with strategy.scope(), pytest.raises(RuntimeError, match="scope"):
        experimental_set_strategy(strategy)
    with pytest.raises(RuntimeError):
        strategy.run(lambda: experimental_set_strategy(strategy))
    assert get_strategy() is default


def test_set_what_is_no_strategy(default):
    for wrong in ("MirroredStrategy", 1, mpistrat.MirroredStrategy, []):
        try:
            with pytest.raises(TypeError):
                experimental_set_strategy(wrong)
        finally:
            modes.stack().clear()
        assert get_strategy() is default


# --- the default strategy ------------------------------------------------------------------------------


@OF_ONE_REPLICA
def test_default_strategy_hands_values_back(default):
    value = {"a": np.ones(2), "b": [3]}
    assert default.num_replicas_in_sync == 1
    assert default.reduce("SUM", 5.0, axis=None) == 5
    assert default.reduce("SUM", value, axis=None)["a"].tolist() == [1, 1]
    assert default.reduce("SUM", np.array([1.0, 2.0]), axis=0) == 3
    assert default.reduce("MEAN", np.array([1, 2]), axis=0) == 1.5
    assert default.gather(value, 0)["a"].tolist() == [1, 1]
    assert get_replica_context().all_reduce("SUM", value)["a"].tolist() == [1, 1]
    assert default.extended.reduce_to("SUM", 5.0, "cpu:0") == 5
    assert default.extended.batch_reduce_to("SUM", [(5.0, "cpu:0"), (6, "cpu:0")]) == [5, 6]
    for call in (lambda op: default.reduce(op, 1.0, axis=None), lambda op: default.extended.reduce_to(op, 1, "cpu")):
        with pytest.raises(ValueError):
            call("LARGEST")
    assert default.experimental_local_results(3) == (3,)
    assert default.experimental_distribute_dataset(value) is value
    contexts = []
    assert default.distribute_datasets_from_function(lambda c: contexts.append(c) or 5) == 5
    assert (contexts[0].num_input_pipelines, contexts[0].input_pipeline_id) == (1, 0)
    assert contexts[0].num_replicas_in_sync == 1
    made = default.experimental_distribute_values_from_function(
        lambda c: (c.replica_id_in_sync_group, c.num_replicas_in_sync)
    )
    assert made == (0, 1)


@OF_ONE_REPLICA
def test_default_strategy_runs(default, strategy):
    def fn(x):
        assert get_strategy() is default
        assert not has_strategy()
        assert not in_cross_replica_context()
        assert get_replica_context().replica_id_in_sync_group == 0
        return x + get_replica_context().merge_call(lambda s, y: (y, s, in_cross_replica_context()), (1,))[0]

    assert default.run(fn, (2,)) == 3
    assert get_replica_context().merge_call(lambda s, x: (s is default, in_cross_replica_context(), x), (4,)) == (
        True,
        True,
        4,
    )
    with strategy.scope(), pytest.raises(RuntimeError, match="Mixing"):
        default.run(fn, (2,))


def test_default_strategy_refuses(default, strategy):
    for call in (lambda: default.extended.worker_devices, lambda: default.extended.parameter_devices):
        with pytest.raises(RuntimeError):
            call()
    with pytest.raises(NotImplementedError):
        default.extended.broadcast_to(1.0, "cpu:0")
    with pytest.raises(TypeError):
        default.extended.broadcast_to(1.0, None)
    for call in (lambda: copy.copy(default), lambda: copy.deepcopy(default), type(default)):
        with pytest.raises(RuntimeError):
            call()
    with strategy.scope(), pytest.raises(RuntimeError, match="Must not nest"):
        default.scope().__enter__()
    with pytest.raises(RuntimeError):
        strategy.run(lambda: default.scope().__enter__())


def test_default_scope(default, strategy):
    with default.scope() as entered:
        assert entered is default
        assert not has_strategy()
        assert not in_cross_replica_context()
        with strategy.scope():
            assert get_strategy() is strategy
        with default.scope():
            assert not has_strategy()
    v, w = Variable(1.0, name="b"), Variable(1.0, name="a")
    extended = default.extended
    assert extended.variable_created_in_scope(v)
    assert extended.non_slot_devices([v, w]) is w
    with extended.colocate_vars_with(v):
        pass
    assert extended.update(v, lambda x, y: x.assign_add(y), (2.0,)).values == (v,)
    assert v.read_value() == 3


def test_variables_in_the_context_that_made_them(strategy, default):
    with strategy.scope():
        v = Variable(1.0)
    assert v.distribute_strategy is strategy
    assert Variable(1.0).distribute_strategy is default
    w = strategy.run(lambda: Variable(2.0))
    assert w.distribute_strategy is strategy
    assert default.extended.variable_created_in_scope(Variable(1.0))
    assert not default.extended.variable_created_in_scope(v)
    assert not strategy.extended.variable_created_in_scope(1.0)


# --- copies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [mpistrat.MirroredStrategy, lambda: mpistrat.OneDeviceStrategy("cpu:0")], ids=["mirrored", "one device"]
)
def test_deepcopy(make):
    strategy = make()
    for one in (strategy, copy.deepcopy(strategy), copy.deepcopy(copy.deepcopy(strategy))):
        n = strategy.num_replicas_in_sync
        assert one.num_replicas_in_sync == n
        assert one.reduce("SUM", 1.0, axis=None) == n
        assert one.extended is not strategy.extended or one is strategy
        with one.scope():
            v = Variable(0.0, aggregation=mpistrat.VariableAggregation.SUM)
            assert get_strategy() is one
        assert v.distribute_strategy is one
        assert one.run(lambda: get_strategy()) is one
        one.run(lambda v=v: v.assign_add(1.0))
        assert float(v) == (n if n > 1 else 1)
    other = copy.deepcopy(strategy)
    with other.scope(), pytest.raises(RuntimeError, match="Mixing"):
        strategy.run(lambda: None)


def test_copies_that_are_refused(strategy):
    for one in (strategy, mpistrat.MirroredStrategy(), mpistrat.OneDeviceStrategy("cpu:0")):
        with pytest.raises(RuntimeError):
            copy.copy(one)
    with pytest.raises(ValueError):
        copy.deepcopy(strategy)


def test_replica_context_by_hand(strategy):
    for wrong in ("a", [1], object()):
        with pytest.raises(ValueError):
            mpistrat.ReplicaContext(strategy, wrong)
    assert mpistrat.ReplicaContext(strategy, None).replica_id_in_sync_group is None
    assert mpistrat.ReplicaContext(strategy, np.int32(0)).replica_id_in_sync_group == 0
    with mpistrat.ReplicaContext(strategy, RANK):
        assert not in_cross_replica_context()
        assert get_strategy() is strategy
    assert not has_strategy()


DEFAULT_CALLS = {
    "all_reduce": lambda replica: replica.all_reduce("SUM", 1.0),
    "all_gather": lambda replica: replica.all_gather(np.ones(1), 0)[0],
    "merge_call": lambda replica: replica.merge_call(lambda strategy: 1.0),
}


@pytest.mark.parametrize("method", DEFAULT_CALLS)
def test_collectives_outside_of_run_combine_nothing_and_say_so(other, method, recwarn):
    call = DEFAULT_CALLS[method]
    replica = get_replica_context()
    assert not recwarn  # the getter is what libraries call to look
    assert call(replica) == 1.0
    said = [warning for warning in recwarn if method in str(warning.message)]
    assert len(said) == (SIZE > 1 and RANK == 0)
    for warning in said:
        assert "`strategy.run`" in str(warning.message)
        assert warning.filename == __file__
    recwarn.clear()
    assert get_strategy().run(lambda: call(get_replica_context())) == 1.0
    other.run(lambda: call(get_replica_context()))
    assert not recwarn
