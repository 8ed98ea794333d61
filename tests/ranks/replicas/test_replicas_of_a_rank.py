"""Several replicas in a rank: what they get, what they share, and what happens when one of them errs."""

import contextvars
import copy
import gc
import math
import os
import signal
import sys
import threading
import time
import tracemalloc
import weakref

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat import (
    IndexedSlices,
    PerReplica,
    ReduceOp,
    VariableAggregation,
    VariableSynchronization,
    get_replica_context,
)
from mpistrat.collectives.ops.of_replicas import ReplicaSums
from mpistrat.runtime.agreement.operation import MismatchError

SIZE = MPI.COMM_WORLD.size
V = 2 * SIZE + 1


@pytest.fixture
def strategy():
    return mpistrat.MultiWorkerMirroredStrategy(virtual_replicas=V)


def number():
    return get_replica_context().replica_id_in_sync_group


def local(strategy, value):
    return [*strategy.experimental_local_results(value)]


def test_numbers_of_replicas(strategy):
    replicas = strategy.extended.engine.replicas
    assert strategy.num_replicas_in_sync == V
    own = strategy.run(number)
    assert isinstance(own, PerReplica)
    assert local(strategy, own) == [*replicas.local]
    assert strategy.gather_object(own) == [*range(V)]
    assert strategy.gather_object({"a": own}) == [{"a": each} for each in range(V)]
    assert strategy.gather(strategy.run(lambda: np.array([number()])), 0).tolist() == [*range(V)]
    assert strategy.run(lambda: None) is None
    a, b = strategy.run(lambda: (number(), {"twice": 2 * number()}))
    assert local(strategy, b["twice"]) == [2 * each for each in local(strategy, a)]
    assert local(strategy, strategy.run(lambda x: x + 1, args=(own,))) == [each + 1 for each in replicas.local]


def test_the_form_does_not_depend_on_the_number_of_ranks():
    one_each = mpistrat.MultiWorkerMirroredStrategy(virtual_replicas=SIZE)
    assert isinstance(one_each.run(lambda: 3.0), PerReplica)
    assert one_each.run(lambda: None) is None
    assert float(one_each.reduce("SUM", one_each.run(lambda: 3.0), axis=None)) == 3.0 * SIZE
    assert isinstance(one_each.rng(3), PerReplica)
    assert isinstance(one_each.scatter(np.arange(SIZE)), PerReplica)
    assert [*map(type, one_each.gather_object(one_each.run(number)))] == [int] * SIZE


def test_a_value_is_copied_or_added_when_it_is_given(strategy):
    scratch = np.zeros(3)

    def fn():
        scratch[...] = number()
        total = get_replica_context().all_reduce("SUM", scratch)
        scratch[...] = 10 * number()
        rows = get_replica_context().all_gather(scratch[:1], axis=0)
        scratch[...] = number()
        merged = get_replica_context().merge_call(lambda strategy, x: strategy.reduce("MAX", x, None), (scratch,))
        for own in (total, rows, merged):
            own += 1  # of this replica only
        return total, rows, merged

    expected = np.full(3, sum(range(V)) + 1.0)
    for total, rows, merged in local(strategy, strategy.run(fn)):
        assert total.tolist() == expected.tolist()
        assert rows.tolist() == [10.0 * each + 1 for each in range(V)]
        assert merged.tolist() == [float(V)] * 3


@pytest.mark.parametrize("replicas", [SIZE, V])
def test_an_asynchronous_all_reduce_has_the_bits_of_the_tree(replicas):
    strategy = mpistrat.MultiWorkerMirroredStrategy(virtual_replicas=replicas)
    values = np.random.default_rng(0).standard_normal((replicas, 999))
    scratch = np.zeros(999)

    def fn():
        replica = get_replica_context()
        scratch[...] = values[number()]
        pending = replica.experimental_all_reduce_async("MEAN", {"a": scratch, "b": 1.0})
        scratch[...] = 99.0
        expected = replica.all_reduce("MEAN", values[number()].copy())
        got = pending.wait()
        assert pending.test()
        assert got["b"] == 1.0
        assert got["a"].tobytes() == expected.tobytes()
        got["a"] += number()  # of this replica only
        return replica.all_reduce("MAX", got["a"][0] - expected[0])

    assert np.allclose(local(strategy, strategy.run(fn)), replicas - 1.0)
    exact = mpistrat.experimental.CommunicationOptions(implementation="exact")
    for wrong, kind, options in ((IndexedSlices(np.ones((1, 2)), [0]), TypeError, None), (1.0, ValueError, exact)):
        with pytest.raises(kind, match="asynchronous"):
            strategy.run(lambda x=wrong, o=options: get_replica_context().experimental_all_reduce_async("SUM", x, o))
    if SIZE > 1:
        with pytest.raises((ValueError, MismatchError)):  # a replica that differs is told on every rank
            strategy.run(lambda: get_replica_context().experimental_all_reduce_async("SUM", np.ones(1 + number() % 2)))
    assert strategy.agree(True)


def test_collectives_of_the_strategy(strategy):
    own = strategy.run(lambda: np.full(2, number(), np.float32))
    total = V * (V - 1) / 2
    assert strategy.reduce("SUM", own, axis=None).tolist() == [total] * 2
    assert float(strategy.reduce("MEAN", own, axis=0)) == (V - 1) / 2
    assert float(strategy.reduce("MAX", own, axis=0)) == V - 1
    assert float(strategy.reduce("SUM", 1.0, axis=None)) == V
    assert strategy.extended.reduce_to("SUM", own, "cpu:0").tolist() == [total] * 2
    assert strategy.broadcast(own, src=V - 1).tolist() == [V - 1] * 2
    assert strategy.broadcast(own).tolist() == [0] * 2
    rows = strategy.scatter(np.arange(3 * V) if strategy.is_chief else None)
    assert strategy.gather(rows, 0).tolist() == [*range(3 * V)]
    block = np.arange(2 * (V + 1) * 3).reshape(2, V + 1, 3)
    for src in (0, V - 1):  # the first replica gets one row more
        parts = strategy.scatter({"a": [block]} if src in strategy.extended.engine.replicas.local else None, 1, src)
        cuts = [[0, 1], *[[i + 1] for i in range(1, V)]]
        for part, replica in zip(local(strategy, parts), strategy.extended.engine.replicas.local, strict=True):
            assert part["a"][0].tolist() == block[:, cuts[replica]].tolist()
    for dst in (0, V - 1):
        one, both = strategy.gather(own, 0, dst=dst), strategy.gather({"a": [own]}, -1, dst=dst)
        objects = strategy.gather_object(own, dst=dst)
        if dst in strategy.extended.engine.replicas.local:
            expected = np.repeat(np.arange(V, dtype=np.float32), 2)
            assert one.tobytes() == both["a"][0].tobytes() == np.concatenate(objects).tobytes() == expected.tobytes()
        else:
            assert one is both is objects is None
    assert strategy.broadcast_object(strategy.comm.rank, src=V - 1) == strategy.extended.engine.replicas.rank_of(V - 1)
    scattered = strategy.run(lambda: get_replica_context().experimental_reduce_scatter("SUM", np.ones(V + 2)))
    assert [len(each) for each in local(strategy, scattered)] == [
        1 + (each < 2) for each in local(strategy, strategy.run(number))
    ]


@pytest.mark.parametrize("replicas", [SIZE, V])
def test_variables_and_mirrored_values_in_sums(replicas):
    strategy = mpistrat.MultiWorkerMirroredStrategy(virtual_replicas=replicas)
    with strategy.scope():
        v = mpistrat.Variable([1.0, 2.0], aggregation=VariableAggregation.SUM)
        own = mpistrat.Variable(0.0, synchronization=VariableSynchronization.ON_READ)
    strategy.run(lambda: own.assign(number()))
    mirrored = strategy.extended.reduce_to("MEAN", np.ones(2), "cpu:0")
    for total, numbers in local(
        strategy, strategy.run(lambda: tuple(get_replica_context().all_reduce("SUM", each) for each in (v, own)))
    ):
        assert total.tolist() == [replicas, 2.0 * replicas]  # a copy of each replica
        assert numbers == replicas * (replicas - 1) / 2
    for wrong in (lambda: v.assign_add(mirrored), lambda: get_replica_context().all_reduce("SUM", mirrored)):
        with pytest.raises(ValueError, match="SUM of a mirrored value"):
            strategy.run(wrong)
    assert v.numpy().tolist() == [1.0, 2.0]
    strategy.run(lambda: v.assign_add(v))
    assert v.numpy().tolist() == [1.0 + replicas, 2.0 + 2.0 * replicas]


def test_buffers_of_sums_are_freed_with_them(strategy):
    """At once: the collector of cycles may come when many gradients' worth of memory is held."""
    engine = strategy.extended.engine
    key = ((np.dtype("f8"), (1000,)),)
    sums = ReplicaSums(engine.topology, engine.ops.shares, ReduceOp.SUM, key, None, 0, None)
    sums.begin()
    for replica in engine.replicas.local:
        sums.add(replica, [np.ones(1000)])
    (total,) = sums.total(None)
    assert total.tolist() == [V] * 1000
    left = weakref.ref(sums)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        del sums
        assert left() is None
    finally:
        if was_enabled:
            gc.enable()


@pytest.mark.parametrize("call", ["gather", "gather_object"])
def test_values_of_other_replicas_on_one_rank_raise_on_all(strategy, call):
    """A rank that cannot split its value by replica does not let the others wait for it."""
    wrong = PerReplica((np.zeros(1),) * (V + 1))
    value = wrong if MPI.COMM_WORLD.rank == SIZE - 1 else np.zeros(1)
    with pytest.raises((ValueError, MismatchError)):
        strategy.gather(value, 0) if call == "gather" else strategy.gather_object(value)
    assert len(strategy.gather_object(0)) == V


def test_a_copied_strategy_has_the_same_sums():
    strategy = mpistrat.MirroredStrategy(virtual_replicas=V)
    for each in (strategy, copy.deepcopy(strategy), strategy):  # the copy is made after its reduction is prepared
        total = each.run(lambda: get_replica_context().all_reduce("SUM", np.full(3, number() + 1.0)))
        assert [own.tolist() for own in local(each, total)] == [[V * (V + 1) / 2] * 3] * len(local(each, total))


def test_a_rank_adds_up_in_few_buffers():
    strategy = mpistrat.MultiWorkerMirroredStrategy(virtual_replicas=24 * SIZE + 1)
    engine, array = strategy.extended.engine, np.ones(1 << 14)
    sums = engine.ops.sums(ReduceOp.SUM, ((array.dtype, array.shape),), engine.options, None)
    tracemalloc.start()
    try:
        sums.begin()
        for replica in engine.replicas.local:
            sums.add(replica, [array])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (2 * int(math.log2(engine.replicas.count)) + 1.5) * array.nbytes
    assert sums.total(None)[0][0] == 24 * SIZE + 1


def test_sparse_rows_come_in_the_order_of_replicas(strategy):
    def fn():
        rows = IndexedSlices(np.full((1, 2), number() + 1.0), np.array([number() % 2]), (2, 2))
        return get_replica_context().all_reduce("MEAN", rows)

    for rows in local(strategy, strategy.run(fn)):
        assert rows.values[:, 0].tolist() == [(each + 1) / V for each in range(V)]
        assert rows.indices.tolist() == [each % 2 for each in range(V)]


ROW = np.dtype([("a", ">f4"), ("b", "<i2")])


@pytest.mark.parametrize("dtype", [">f4", "<f4", ">i8", ">U2", ROW], ids=str)
@pytest.mark.parametrize("replicas", [SIZE, V])
def test_a_gather_keeps_the_dtype(dtype, replicas):
    strategy = mpistrat.MultiWorkerMirroredStrategy(virtual_replicas=replicas)
    expected = np.arange(replicas).astype(dtype)

    def own():
        return np.array([number()]).astype(dtype)

    gathered = strategy.run(lambda: get_replica_context().all_gather(own(), axis=0))
    for got in (*local(strategy, gathered), strategy.gather(strategy.run(own), 0)):
        assert (got.dtype, got.tobytes()) == (expected.dtype, expected.tobytes())
    if dtype == ">f4":
        rows = strategy.run(lambda: get_replica_context().all_reduce("SUM", IndexedSlices(own(), np.array([0]), (2,))))
        assert {each.values.dtype.str for each in local(strategy, rows)} == {dtype}


def test_variables(strategy):
    with strategy.scope():
        summed = mpistrat.Variable(0.0, aggregation=VariableAggregation.SUM)
        first = mpistrat.Variable(0.0, aggregation=VariableAggregation.ONLY_FIRST_REPLICA)
        rows = mpistrat.Variable(np.zeros((2, 1)), aggregation=VariableAggregation.SUM)
        plain = mpistrat.Variable(0.0)
        counts = [
            mpistrat.Variable(0.0, synchronization=VariableSynchronization.ON_READ, aggregation=how)
            for how in (VariableAggregation.SUM, VariableAggregation.MEAN, VariableAggregation.ONLY_FIRST_REPLICA)
        ]

    def fn():
        summed.assign_add(number())
        first.assign(number() + 5.0)
        rows.scatter_add(IndexedSlices(np.ones((1, 1)), np.array([number() % 2])))
        for count in counts:
            count.assign_add(number() + 1.0)
        return [float(count) for count in counts]

    own = strategy.run(fn)
    assert float(summed) == V * (V - 1) / 2
    assert float(first) == 5.0
    assert rows.numpy()[:, 0].tolist() == [(V + 1) // 2, V // 2]
    assert [float(count) for count in counts] == [V * (V + 1) / 2, (V + 1) / 2, 1.0]
    assert [each[0] for each in local(strategy, own)] == [each + 1 for each in strategy.extended.engine.replicas.local]
    counts[0].assign(V * 2.0)
    assert [float(each) for each in local(strategy, counts[0])] == [2.0] * strategy.extended.engine.replicas.count
    with pytest.raises(ValueError, match="aggregation="):
        strategy.run(lambda: plain.assign(1.0))
    assert strategy.agree(True)


def test_devices_are_regrouped_as_in_tensorflow():
    strategy = mpistrat.MirroredStrategy(devices=["cpu:0"] * (2 * SIZE))
    assert strategy.run(lambda: None) is None
    same = object()
    assert strategy.run(lambda: same) is same
    assert isinstance(strategy.run(number), PerReplica)
    assert float(strategy.reduce("SUM", strategy.run(lambda: number() * 1.0), None)) == SIZE * (2 * SIZE - 1)
    assert strategy.run(lambda: {"same": same, "small": 3, "own": number()})["small"] == 3
    assert isinstance(strategy.run(lambda: np.float32(3)), PerReplica)  # equal, but two objects
    with strategy.scope():
        variable = mpistrat.Variable(1.0)
    assert strategy.run(lambda: variable) is variable
    with pytest.raises(ValueError, match="structures must be equal"):
        strategy.run(lambda: [1] * (1 + number() % 2))
    assert strategy.agree(True)


def test_arguments_and_results_of_merge_call_are_regrouped_as_in_tensorflow():
    strategy = mpistrat.MirroredStrategy(devices=["cpu:0"] * (2 * SIZE))
    same, calls = object(), []

    def merge(strategy, bare, differ, nested, keyword):
        calls.append(1)
        assert bare is same
        assert keyword == 5
        assert local(strategy, differ) == local(strategy, nested["x"][0]) == [*own]
        assert nested["x"][1] is same
        return {"differ": differ, "same": same, "total": strategy.reduce("SUM", differ, axis=None)}

    def fn():
        i = number()
        got = get_replica_context().merge_call(merge, (same, i, {"x": (i, same)}), {"keyword": 5})
        assert (got["differ"], got["same"]) == (i, same)
        return float(got["total"])

    own = strategy.extended.engine.replicas.local
    assert local(strategy, strategy.run(fn)) == [SIZE * (2 * SIZE - 1.0)] * 2
    assert calls == [1]  # once a rank


def test_generators_are_those_of_the_replicas(strategy):
    own = strategy.run(lambda: strategy.rng(7).integers(1000))
    outside = [each.integers(1000) for each in local(strategy, strategy.rng(7))]
    assert local(strategy, own) == outside


def test_what_holds_for_the_caller_holds_for_its_replicas(strategy):
    var = contextvars.ContextVar("var", default=0)
    var.set(5)
    idents = []

    def fn():
        get_replica_context().all_reduce("SUM", 1.0)
        idents.append(threading.get_ident())
        with np.errstate(all="ignore"):
            get_replica_context().all_reduce("SUM", 1.0)
        return var.get(), np.geterr()["over"]

    with np.errstate(over="raise"):
        for got in local(strategy, strategy.run(fn)):
            assert got == (5, "raise")
    assert idents[0] == threading.get_ident()
    assert len({*idents}) == strategy.extended.engine.replicas.count


def test_without_a_call_all_run_on_the_thread_of_the_caller(strategy):
    own = strategy.run(threading.get_ident)
    assert {*local(strategy, own)} == {threading.get_ident()}


def test_an_error_ends_the_replicas_that_wait(strategy):
    replicas = strategy.extended.engine.replicas
    ended = []

    def fn():
        try:
            if get_replica_context().number_here == replicas.count - 1:
                raise KeyError("mine")
            get_replica_context().all_reduce("SUM", 1.0)
        finally:
            ended.append(number())

    with pytest.raises(KeyError, match="mine") as raised:
        strategy.run(fn)
    if sys.version_info >= (3, 11):  # which has notes
        assert raised.value.__notes__ == [f"replica {replicas.local[-1]} of {V}"]
    assert sorted(ended) == [*replicas.local]
    assert (
        float(strategy.reduce("SUM", strategy.run(lambda: get_replica_context().all_reduce("MAX", 2.0)), None))
        == 2.0 * V
    )


@pytest.mark.parametrize("who", ["first", "last"])
@pytest.mark.parametrize("what", ["another call", "a call less", "another shape", "another op"])
def test_replicas_that_differ_are_told_on_every_rank(strategy, who, what):
    odd = 0 if who == "first" else V - 1

    def fn():
        replica, differs = get_replica_context(), number() == odd
        if what == "another call" and differs:
            return replica.all_gather(np.ones(1), 0)
        if what == "a call less" and differs:
            return None
        length = 2 if what == "another shape" and differs else 1
        return replica.all_reduce("MAX" if what == "another op" and differs else "SUM", np.ones(length))

    kind = RuntimeError if what in ("another call", "a call less") else (ValueError, MismatchError)
    if strategy.extended.engine.replicas.count == 1:
        kind = MismatchError
    with pytest.raises(kind, match="replica"):
        strategy.run(fn)
    assert strategy.agree(True)


def test_an_error_of_a_call_is_raised_in_each_replica(strategy):
    caught = []

    def fn():
        try:
            get_replica_context().all_reduce("SUM", np.array([True]))
        except TypeError:
            caught.append(number())
        return get_replica_context().all_reduce("SUM", 1.0)

    assert float(strategy.reduce("MAX", strategy.run(fn), None)) == V
    assert sorted(caught) == [*strategy.extended.engine.replicas.local]


def test_ctrl_c_ends_the_replica_that_runs_and_those_that_wait(strategy):
    last = strategy.extended.engine.replicas.count - 1
    ended = []

    def fn():
        try:
            get_replica_context().all_reduce("SUM", 1.0)
            if get_replica_context().number_here == last:
                os.kill(os.getpid(), signal.SIGINT)
                while True:
                    time.sleep(0.001)
            get_replica_context().all_reduce("SUM", 1.0)
        finally:
            ended.append(number())

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have told it to be ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            strategy.run(fn)
    finally:
        signal.signal(signal.SIGINT, before)
    assert sorted(ended) == [*strategy.extended.engine.replicas.local]
    assert strategy.agree(True)
    assert float(strategy.reduce("MAX", strategy.run(lambda: get_replica_context().all_reduce("SUM", 1.0)), None)) == V


@pytest.mark.skipif(SIZE == 1, reason="needs a rank that stays away")
def test_a_time_limit_ends_the_calls_of_all_replicas():
    comm = MPI.COMM_WORLD.Dup()
    options = mpistrat.experimental.CommunicationOptions(timeout_seconds=0.5)
    strategy = mpistrat.MultiWorkerMirroredStrategy(comm=comm, virtual_replicas=V, communication_options=options)
    ended = []

    def fn():
        try:
            get_replica_context().all_reduce("SUM", 1.0)
        finally:
            ended.append(number())

    if comm.rank < SIZE - 1:
        with pytest.raises(TimeoutError, match=rf"rank {SIZE - 1} of {SIZE} did not come within 0\.5 s"):
            strategy.run(fn)
        assert sorted(ended) == [*strategy.extended.engine.replicas.local]
    comm.Barrier()


def test_a_replica_that_is_told_to_stop_ends_all_at_one_step(strategy, tmp_path):
    """The signal comes while a replica runs in a thread of its own."""
    comm = MPI.COMM_WORLD
    with strategy.scope():
        v = mpistrat.Variable(0.0, aggregation=VariableAggregation.SUM)
    handler = mpistrat.experimental.PreemptionCheckpointHandler(strategy.cluster_resolver, [v], tmp_path / "saved")

    def fn():
        get_replica_context().all_reduce("SUM", 1.0)
        if handler.total_run_calls == 2 and number() == V - 1:
            os.kill(os.getpid(), signal.SIGUSR2)
        v.assign_add(1.0)

    for _ in range(3):
        handler.run(strategy.run, fn)
    with pytest.raises(SystemExit):
        handler.run(strategy.run, fn)
    assert comm.allgather((handler.total_run_calls, float(v))) == SIZE * [(3, 3.0 * V)]


def test_gradients_of_each_replica_are_checked():
    mpistrat.rc.debug = "gradients"
    try:
        strategy = mpistrat.MultiWorkerMirroredStrategy(comm=MPI.COMM_WORLD.Dup(), virtual_replicas=V)
    finally:
        del mpistrat.rc.debug
    with strategy.scope():
        v = mpistrat.Variable(np.zeros(2))
    optimizer = mpistrat.optimizers.SGD(0.1)

    def fn(bad):
        optimizer.apply_gradients([(np.full(2, np.nan if number() == bad else 1.0), v)])

    strategy.run(fn, args=(-1,))
    has_it = V - 2 in strategy.extended.engine.replicas.local
    text = f"replica {V - 2}, step 2: the gradient of variable" if has_it else None
    with pytest.raises((FloatingPointError, MismatchError), match=text):
        strategy.run(fn, args=(V - 2,))


def test_a_function_that_runs_in_two_threads_is_refused(strategy):
    raised = []

    def fn():
        def other():
            try:
                strategy.run(number)
            except RuntimeError as error:
                raised.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    strategy.run(fn)
    assert len(raised) == strategy.extended.engine.replicas.count
    assert "one function at a time" in raised[0]


def test_replicas_that_share_a_lock_do_not_wait_for_each_other_outside_of_calls(strategy):
    lock = threading.Lock()

    def fn():
        with lock:
            value = float(number())
        return get_replica_context().all_reduce("SUM", value)

    assert float(strategy.reduce("MAX", strategy.run(fn), None)) == V * (V - 1) / 2


def test_collectives_outside_of_the_meeting_are_refused(strategy):
    for call in (strategy.barrier, lambda: strategy.agree(True), lambda: mpistrat.Variable(1.0)):
        with pytest.raises(RuntimeError, match="this rank plays several replicas"):
            strategy.run(call)
    with pytest.raises(RuntimeError, match="cannot run another"):
        strategy.run(lambda: strategy.run(number))
    options = mpistrat.experimental.CommunicationOptions(implementation="ordered")
    with pytest.raises(ValueError, match='"ordered" adds values in the order of ranks'):
        strategy.run(lambda: get_replica_context().all_reduce("SUM", 1.0, options))
    assert strategy.agree(True)


@pytest.mark.parametrize("wrong", [1.5, "3", True, 0, -1, SIZE - 1])
def test_numbers_that_are_wrong(wrong):
    kind = ValueError if type(wrong) is int else TypeError
    for make in (mpistrat.MultiWorkerMirroredStrategy, mpistrat.MirroredStrategy):
        with pytest.raises(kind, match="replicas"):
            make(virtual_replicas=wrong)


@pytest.mark.skipif(SIZE == 1, reason="for several ranks")
def test_numbers_that_differ():
    rank = MPI.COMM_WORLD.rank
    for wrong in (SIZE + rank, 1.5 if rank else SIZE, 0 if rank else SIZE):
        with pytest.raises(ValueError):
            mpistrat.MultiWorkerMirroredStrategy(virtual_replicas=wrong)
    assert mpistrat.MultiWorkerMirroredStrategy().agree(True)


def test_replicas_stay_in_step_after_a_call_that_was_refused(strategy):
    def fn():
        replica = get_replica_context()
        try:
            replica.all_gather(np.ones(1), 0) if number() == 1 else replica.all_reduce("SUM", 1.0)
        except RuntimeError:
            return replica.all_reduce("SUM", 10.0)
        raise AssertionError("the call was not refused")

    assert float(strategy.reduce("MAX", strategy.run(fn), None)) == 10.0 * V


def test_the_fastest_algorithm_is_there_by_name():
    def algorithm(replicas, **options):
        made = mpistrat.MultiWorkerMirroredStrategy(
            virtual_replicas=replicas, communication_options=mpistrat.experimental.CommunicationOptions(**options)
        )
        assert float(made.reduce("SUM", made.run(lambda: 2.0), axis=None)) == 2.0 * replicas
        return made.extended.engine.options.algorithm

    for replicas in (SIZE, V):
        assert algorithm(replicas, implementation="auto") is None
        assert algorithm(replicas, bytes_per_pack=8) == "tree"
        assert algorithm(replicas, implementation="exact") == "exact"
