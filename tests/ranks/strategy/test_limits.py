"""A strategy's limit of time holds in every call that communicates: one that is not listed here fails a test."""

import contextlib
import os
import subprocess
import time

import numpy as np
import pytest
from mpi4py import MPI
from selection import core

import mpistrat
from mpistrat import data, training
from mpistrat.collectives.asynchronous import PendingAllReduce
from mpistrat.experimental import CommunicationOptions
from mpistrat.training import PendingSave
from mpistrat.training.checkpoint import by_all
from mpistrat.values.array_like import READING
from mpistrat.variables import MirroredVariable, SyncOnReadVariable

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
ROWS = mpistrat.IndexedSlices(np.ones((1, 2)), np.array([0]))


class Case:
    """A strategy, and what calls need that were made before the last rank stopped coming."""

    def __init__(self, folder):
        options = CommunicationOptions(timeout_seconds=60)
        self.strategy = mpistrat.MultiWorkerMirroredStrategy(comm=WORLD.Dup(), communication_options=options)
        self.extended = self.strategy.extended
        self.path = WORLD.bcast(folder) / "weights.h5"
        with self.strategy.scope():
            self.mirrored = mpistrat.Variable(np.zeros((2, 2)), aggregation=mpistrat.VariableAggregation.SUM, name="v")
            self.first = mpistrat.Variable(
                np.zeros((2, 2)), aggregation=mpistrat.VariableAggregation.ONLY_FIRST_REPLICA
            )
            self.on_read = mpistrat.Variable(
                np.zeros(2),
                synchronization=mpistrat.VariableSynchronization.ON_READ,
                aggregation=mpistrat.VariableAggregation.SUM,
            )
            self.mean = mpistrat.metrics.Mean()
            self.optimizer = mpistrat.optimizers.SGD(0.1)
            self.shared_out = mpistrat.optimizers.Adam(shard_state=True)
            self.shared_out.build([self.mirrored])
        training.save([self.mirrored], self.path)
        self.buffer = self.strategy.experimental_buffers_like(np.zeros(3))
        endless = data.Dataset.from_iterable(lambda: iter(range(8))).batch(2)
        self.stream = self.strategy.distribute_datasets_from_function(lambda context: endless)
        self.streamed = iter(self.strategy.experimental_distribute_dataset(endless))
        self.ops = mpistrat.ReductionToOneDevice().bound_to(self.extended.engine.topology)
        WORLD.Barrier()

    def hurry(self, seconds=0.05):
        """From now on wait for a short time only."""
        self.extended.engine.topology.lock.timeout_seconds = seconds
        self.extended.engine.options = CommunicationOptions(timeout_seconds=seconds)

    def replica(self, fn):
        return self.strategy.run(lambda: fn(mpistrat.get_replica_context()))


def chief_first(case):
    with case.strategy.chief_first():
        pass


def writer(case):
    data.Writer(case.path.with_name("v.h5"), strategy=case.strategy)


def variable(case):
    with case.strategy.scope():
        mpistrat.Variable(1.0)


def assigned(name, value):
    return lambda case: case.strategy.run(lambda: getattr(case.mirrored, name)(value))


def preempted(case):
    with case.strategy.scope():
        handler = mpistrat.experimental.PreemptionCheckpointHandler(None, [case.mirrored], str(case.path.parent))
        handler.save_checkpoint_if_preempted()


# What communicates, by what a user calls it.
CALLS = {
    "Strategy.agree": lambda case: case.strategy.agree(True),
    "Strategy.barrier": lambda case: case.strategy.barrier(),
    "Strategy.chief_first": chief_first,
    "Strategy.distribute_datasets_from_function": lambda case: case.strategy.distribute_datasets_from_function(
        lambda context: data.Dataset.range(4).batch(2)
    ),
    "Strategy.experimental_distribute_datasets_from_function": lambda case: (
        case.strategy.experimental_distribute_datasets_from_function(lambda context: data.Dataset.range(4).batch(2))
    ),
    "Strategy.experimental_buffers_like": lambda case: case.strategy.experimental_buffers_like(np.zeros(3)),
    "Strategy.experimental_statistics": lambda case: case.strategy.experimental_statistics(),
    "Strategy.experimental_distribute_dataset": lambda case: case.strategy.experimental_distribute_dataset(
        data.Dataset.range(8).batch(2)
    ),
    "Strategy.all_reduce": lambda case: case.strategy.all_reduce("MAX", {"a": 1.0}),
    "Strategy.broadcast": lambda case: case.strategy.broadcast({"a": 1.0}),
    "Strategy.broadcast_object": lambda case: case.strategy.broadcast_object("a"),
    "Strategy.gather_object": lambda case: case.strategy.gather_object("a"),
    "Strategy.gather_object to one": lambda case: case.strategy.gather_object("a", dst=0),
    "Strategy.gather to one": lambda case: case.strategy.gather(np.ones(2), axis=0, dst=0),
    "Strategy.scatter": lambda case: case.strategy.scatter(np.ones(2)),
    "Strategy.gather": lambda case: case.strategy.gather(np.ones(2), axis=0),
    "Strategy.reduce": lambda case: case.strategy.reduce("SUM", 1.0, axis=None),
    "Strategy.reduce over an axis": lambda case: case.strategy.reduce("SUM", np.ones(3), axis=0),
    "Strategy.reduce of a list": lambda case: case.strategy.reduce("SUM", [np.ones(3), 1.0], axis=None),
    "Strategy.reduce of a dict": lambda case: case.strategy.reduce("SUM", {"a": 1.0}, axis=None),
    "Strategy.reduce of a buffer": lambda case: case.strategy.reduce("SUM", case.buffer, axis=None),
    "Strategy.reduce of rows": lambda case: case.strategy.reduce("SUM", ROWS, axis=None),
    "StrategyExtended.batch_reduce_to": lambda case: case.extended.batch_reduce_to("SUM", [(1.0, "cpu:0")]),
    "StrategyExtended.batch_read": lambda case: case.extended.batch_read([case.on_read]),
    "StrategyExtended.broadcast_to": lambda case: case.extended.broadcast_to(np.ones(3), "cpu:0"),
    "StrategyExtended.read_var": lambda case: case.extended.read_var(case.on_read),
    "StrategyExtended.reduce_to": lambda case: case.extended.reduce_to("SUM", 1.0, "cpu:0"),
    "ReplicaContext.all_gather": lambda case: case.replica(lambda here: here.all_gather(np.ones(2), 0)),
    "ReplicaContext.all_reduce": lambda case: case.replica(lambda here: here.all_reduce("SUM", 1.0)),
    "ReplicaContext.experimental_all_reduce_async": lambda case: case.replica(
        lambda here: here.experimental_all_reduce_async("SUM", 1.0)
    ),
    "ReplicaContext.experimental_reduce_scatter": lambda case: case.replica(
        lambda here: here.experimental_reduce_scatter("SUM", np.ones(4))
    ),
    "CrossDeviceOps.batch_reduce": lambda case: case.ops.batch_reduce("SUM", [(1.0, "cpu:0")]),
    "CrossDeviceOps.broadcast": lambda case: case.ops.broadcast(1.0, "cpu:0"),
    "CrossDeviceOps.reduce": lambda case: case.ops.reduce("SUM", 1.0, "cpu:0"),
    "Variable": variable,
    "Variable.assign": assigned("assign", np.ones((2, 2))),
    "Variable.assign of the first replica's": lambda case: case.strategy.run(
        lambda: case.first.assign(np.ones((2, 2)))
    ),
    "Variable.assign_add": assigned("assign_add", np.ones((2, 2))),
    "Variable.assign_sub": assigned("assign_sub", np.ones((2, 2))),
    "Variable.numpy": lambda case: case.on_read.numpy(),
    "Variable.sum": lambda case: case.on_read.sum(),
    "Variable.read_value": lambda case: case.on_read.read_value(),
    "Variable.value": lambda case: case.on_read.value(),
    "Variable.gather_nd": lambda case: case.on_read.gather_nd([[0]]),
    "Variable.sparse_read": lambda case: case.on_read.sparse_read([0]),
    "Variable.scatter_add": assigned("scatter_add", ROWS),
    "Variable.scatter_sub": assigned("scatter_sub", ROWS),
    "Variable.scatter_update": lambda case: case.strategy.run(lambda: case.first.scatter_update(ROWS)),
    "Variable.scatter_div": lambda case: case.strategy.run(lambda: case.first.scatter_div(ROWS)),
    "Variable.scatter_max": lambda case: case.strategy.run(lambda: case.first.scatter_max(ROWS)),
    "Variable.scatter_min": lambda case: case.strategy.run(lambda: case.first.scatter_min(ROWS)),
    "Variable.scatter_mul": lambda case: case.strategy.run(lambda: case.first.scatter_mul(ROWS)),
    "Optimizer.apply_gradients": lambda case: case.strategy.run(
        lambda: case.optimizer.apply_gradients([(np.ones((2, 2)), case.mirrored)])
    ),
    "Optimizer.apply_gradients of shared-out state": lambda case: case.strategy.run(
        lambda: case.shared_out.apply_gradients([(np.ones((2, 2)), case.mirrored)])
    ),
    "Variable.read_value of shared-out state": lambda case: case.shared_out.variables[2].read_value(),
    "Optimizer.build": lambda case: case.optimizer.build([case.mirrored]),
    "Metric.add_total": lambda case: in_scope(case, lambda: case.mean.add_total("more")),
    "Metric.add_weight": lambda case: in_scope(case, lambda: case.mean.add_weight("more")),
    "Metric.result": lambda case: in_scope(case, case.mean.result),
    "History.log": lambda case: in_scope(case, lambda: training.History().log(loss=1.0)),
    "training.global_moments": lambda case: case.strategy.run(training.global_moments, (np.ones(3), [0])),
    "training.latest_checkpoint": lambda case: in_scope(case, lambda: training.latest_checkpoint(case.path.parent)),
    "training.load": lambda case: training.load([case.mirrored], case.path),
    "training.load_arrays": lambda case: training.load_arrays(case.path, [case.mirrored]),
    "training.save": lambda case: training.save([case.mirrored], case.path),
    "training.save_async": lambda case: training.save_async([case.mirrored], case.path),
    "PreemptionCheckpointHandler.save_checkpoint_if_preempted": preempted,
    "Writer": writer,
    "Writer.append": lambda case: case.writer.append("u", np.ones(2)),
    "Writer.close": lambda case: case.writer.close(),
    "Writer.flush": lambda case: case.writer.flush(),
    "DistributedIterator.get_next": lambda case: next(iter(case.stream)),
    "DistributedIterator.get_next_as_optional": lambda case: case.streamed.get_next_as_optional(),
    "DistributedDataset.reduce": lambda case: case.stream.reduce(0, lambda state, batch: state),
}

# What does not, or as something above does.
LOCAL = [
    "Strategy.colocate_vars_with",
    "Strategy.experimental_distribute_values_from_function",
    "Strategy.run",
    "Strategy.experimental_local_results",
    "Strategy.experimental_run_v2",
    "Strategy.group",
    "Strategy.rng",
    "Strategy.scope",
    "Strategy.unwrap",
    "StrategyExtended.batch_update",
    "StrategyExtended.call_for_each_replica",
    "StrategyExtended.check_variable",
    "StrategyExtended.colocate_vars_with",
    "StrategyExtended.non_slot_devices",
    "StrategyExtended.experimental_run_steps_on_iterator",
    "StrategyExtended.experimental_make_numpy_dataset",
    "StrategyExtended.update",
    "StrategyExtended.update_non_slot",
    "StrategyExtended.value_container",
    "StrategyExtended.variable_class",
    "StrategyExtended.variable_class_for",
    "StrategyExtended.variable_created_in_scope",
    "ReplicaContext.merge_call",
    "CrossDeviceOps.all_reduce",
    "CrossDeviceOps.all_reduce_arrays",
    "CrossDeviceOps.all_reduce_rows",
    "CrossDeviceOps.batch_reduce_implementation",
    "CrossDeviceOps.bound_to",
    "CrossDeviceOps.broadcast_implementation",
    "CrossDeviceOps.gathered",
    "CrossDeviceOps.joined_all_reduce",
    "CrossDeviceOps.joins_arrays",
    "CrossDeviceOps.reduce_implementation",
    "CrossDeviceOps.reduce_parts",
    "Variable.after_local_write",
    *(f"Variable.{name}" for name in ("fill", "partition", "put", "resize", "sort")),  # they refuse
    "Variable.batch_scatter_update",
    "Variable.check_rows",
    "Variable.copied_for",
    "Variable.get_shape",
    "Variable.own_copies",
    "Variable.own_copy",
    "Variable.ref",
    "Variable.scatter_nd_add",
    "Variable.scatter_nd_max",
    "Variable.scatter_nd_min",
    "Variable.scatter_nd_sub",
    "Variable.scatter_nd_update",
    "Variable.set_shape",
    "Variable.without_value",
    "Variable.write",  # `assign` and its sisters call it
    "Optimizer.finalize_variable_values",
    "Optimizer.get_config",
    "Optimizer.rate_after",
    "Optimizer.initial_state",
    "Optimizer.named_variables",
    "Optimizer.on_gpu",
    "Optimizer.update",
    "Optimizer.update_consuming",
    "Optimizer.update_rows",
    "Optimizer.when_grown",
    "Metric.get_config",
    "Metric.named_variables",
    "Metric.reset_state",
    "Metric.reset_states",
    "Metric.update_state",
    "PreemptionCheckpointHandler.run",
    "PreemptionCheckpointHandler.watch_preemption_scope",
    "History.get_state",
    "History.plot",
    "History.set_state",
    "DistributedDataset.restore",
    "DistributedDataset.state",
    "DistributedIterator.restore",
    "DistributedIterator.state",
    "PendingSave.done",
    "PendingSave.wait",
    "PendingAllReduce.test",
    "PendingAllReduce.wait",
    "PendingAllReduce.wait_for_mpi",
    "Writer.steps",
    "training.progress",
]

# Methods of arrays, made by the function that makes `Variable.sum`.
AS_SUM = {f"Variable.{name}" for name in READING}


CLASSES = {
    "Strategy": mpistrat.MultiWorkerMirroredStrategy,
    "StrategyExtended": mpistrat.StrategyExtended,
    "ReplicaContext": mpistrat.ReplicaContext,
    "CrossDeviceOps": mpistrat.CrossDeviceOps,
    "Variable": mpistrat.Variable,
    "Optimizer": mpistrat.optimizers.SGD,
    "Metric": mpistrat.metrics.Mean,
    "PreemptionCheckpointHandler": mpistrat.experimental.PreemptionCheckpointHandler,
    "DistributedDataset": mpistrat.DistributedDataset,
    "DistributedIterator": mpistrat.DistributedIterator,
    "PendingSave": PendingSave,
    "History": training.History,
    "PendingAllReduce": PendingAllReduce,
    "Writer": data.Writer,
}


def in_scope(case, fn):
    with case.strategy.scope():
        return fn()


def public(thing):
    return {name for name in dir(thing) if not name.startswith("_") and callable(getattr(thing, name))}


def test_every_public_call_is_listed():
    found = {f"{name}.{method}" for name, each in CLASSES.items() for method in public(each)}
    found |= {f"training.{name}" for name in training.__all__ if not isinstance(getattr(training, name), type)}
    found |= {"Variable", "Writer"}
    kinds = {f"Variable.{name}" for kind in (MirroredVariable, SyncOnReadVariable) for name in public(kind)}
    listed = {*CALLS, *LOCAL, *AS_SUM}
    assert (found | kinds) - listed == set()
    variants = {name for name in listed if " " in name}
    assert listed - variants - found == set()
    assert not {*CALLS} & {*LOCAL}


@pytest.mark.ranks(min=2, max=2)
@pytest.mark.filterwarnings("ignore:experimental_distribute_datasets_from_function:DeprecationWarning")
@pytest.mark.parametrize(
    "name",
    core(
        sorted(CALLS),
        *("Strategy.reduce of a list", "CrossDeviceOps.broadcast", "DistributedIterator.get_next"),
        *("Metric.result", "Optimizer.apply_gradients", "Variable.assign"),
    ),
)
def test_rank_that_does_not_come_is_named(name, tmp_path):
    case = Case(tmp_path)
    with contextlib.ExitStack() as stack:
        if name.startswith("Writer."):
            case.writer = data.Writer(case.path.with_name("u.h5"), strategy=case.strategy)
            # As after an error: without the other ranks.
            stack.callback(case.writer.__exit__, None, TimeoutError(), None)
        require_named(case, name)


def require_named(case, name):
    case.hurry()
    if RANK < SIZE - 1:
        with pytest.raises(TimeoutError, match=rf"rank {SIZE - 1} of {SIZE} did not come within 0.05 s"):
            CALLS[name](case)
        with pytest.raises(RuntimeError, match="after a time-out"):
            case.strategy.barrier()
    WORLD.Barrier()


@pytest.mark.ranks(min=3)
def test_ranks_that_were_stopped_are_not_named(tmp_path):
    """Such as by a machine that pauses: rank 0 may go on later than those that ask it."""
    case = Case(tmp_path)
    case.hurry(1.0)
    if RANK < SIZE - 1:
        own, seconds = os.getpid(), 2.5 if RANK else 2.8
        stop = f"sleep 0.5; kill -STOP {own}; sleep {seconds}; kill -CONT {own}"
        named = rf"rank {SIZE - 1} of {SIZE} did not come within 1 s"
        with subprocess.Popen(["sh", "-c", stop]), pytest.raises(TimeoutError, match=named):
            case.strategy.barrier()
    WORLD.Barrier()


@pytest.mark.ranks(min=2, max=2)
@pytest.mark.parametrize("call", ["done", "wait"])
def test_save_under_way(call, tmp_path):
    case = Case(tmp_path)
    pending = training.save_async([case.mirrored], case.path)
    WORLD.Barrier()
    case.hurry()
    if RANK < SIZE - 1:
        with pytest.raises(TimeoutError, match=r"rank 1 of 2 did not come within 0\.05 s"):
            getattr(pending, call)()
    WORLD.Barrier()
    case.extended.engine.topology.lock.give_up(
        "after a time-out", "of the other rank"
    )  # nor does this rank wait for the save


def test_limits_of_two_strategies_on_one_communicator():
    """They share the ranks' order of collectives, and each has its own limit."""
    comm = WORLD.Dup()
    short, none = (
        mpistrat.MultiWorkerMirroredStrategy(
            comm=comm, communication_options=CommunicationOptions(timeout_seconds=limit)
        )
        for limit in (30, None)
    )
    for _ in range(3):
        for strategy in (short, none):
            assert strategy.reduce("SUM", 1.0, axis=None) == SIZE
            strategy.barrier()
            with strategy.scope():
                assert mpistrat.Variable(1.0).read_value() == 1


@pytest.mark.full
@pytest.mark.ranks(min=2, max=2)
def test_the_chief_may_take_its_time_to_write(tmp_path, monkeypatch):
    """The limit is for the ranks to come, not for what one of them does when all are there."""
    case = Case(tmp_path)
    prepare = by_all.prepare_alone

    def slowly(*arguments):
        time.sleep(2.5)
        return prepare(*arguments)

    monkeypatch.setattr(by_all, "prepare_alone", slowly)
    WORLD.Barrier()
    case.extended.engine.topology.lock.timeout_seconds = 2.0
    training.save([case.mirrored], case.path)
