"""Programs that chief and workers all run, with variables on parameter servers: ``python between_workers.py JOBS``.

``JOBS`` is as ``chief=1,worker=2,ps=1``.
"""

import gc
import sys
import time

import numpy as np
from raised import raised

import mpistrat
from mpistrat.cluster_resolver import MpiClusterResolver
from mpistrat.compat.v1.experimental import ParameterServerStrategy

STEPS = 20
LARGE = 100_000  # elements: the memory of such an array is found again


def workers_of(strategy):
    tasks = strategy.cluster_resolver.tasks()
    return len(tasks.get("chief", ())) + len(tasks["worker"])


def meet(strategy):
    """Wait until all workers are here."""
    with strategy.scope():
        here = mpistrat.Variable(0, name="here")
    here.assign_add(1)
    while int(here) < workers_of(strategy):
        time.sleep(0.001)


def updates_of_all_workers_count(strategy):
    chief = strategy.extended.should_checkpoint
    with strategy.scope():
        v = mpistrat.Variable([1.0, 2.0] if chief else [7.0, 7.0], name="v")
        w = mpistrat.Variable(np.zeros(3), name="w")
    servers = len(strategy.cluster_resolver.tasks()["ps"])
    assert (v.device, w.device) == ("/job:ps/task:0", f"/job:ps/task:{1 % servers}")
    for _ in range(STEPS):
        strategy.run(lambda: w.assign_add(np.ones(3)))
    meet(strategy)
    np.testing.assert_array_equal(v.read_value(), [1.0, 2.0])
    np.testing.assert_array_equal(w.read_value(), np.full(3, STEPS * workers_of(strategy), float))


def optimizers_update_on_the_servers(strategy):
    """Steps with one gradient, in any order of workers, are the steps of a serial optimizer."""
    gradient, start = np.array([1.0, -2.0]), np.array([0.5, 0.5])
    with strategy.scope():
        v = mpistrat.Variable(start, name="weights")
        optimizer = mpistrat.optimizers.SGD(0.1, momentum=0.9)
    for _ in range(STEPS):
        strategy.run(lambda: optimizer.apply_gradients([(gradient, v)]))
    meet(strategy)
    oracle, serial = mpistrat.Variable(start), mpistrat.optimizers.SGD(0.1, momentum=0.9)
    for _ in range(STEPS * workers_of(strategy)):
        serial.apply_gradients([(gradient, oracle)])
    np.testing.assert_allclose(v.read_value(), oracle.read_value(), rtol=1e-12)
    assert optimizer.iterations == serial.iterations
    assert optimizer.variables[2].device == v.device


def contexts(strategy):
    task, number = strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id
    first = task == "chief" or (number == 0 and "chief" not in strategy.cluster_resolver.tasks())
    extended = strategy.extended
    assert first == strategy.is_chief == extended.should_checkpoint == extended.experimental_should_init
    assert extended.experimental_between_graph
    with strategy.scope():
        v = mpistrat.Variable(2.0)
        assert mpistrat.in_cross_replica_context()
        assert float(strategy.reduce("SUM", 3.0)) == 3.0
    context = strategy.run(mpistrat.get_replica_context)
    assert (context.num_replicas_in_sync, context.replica_id_in_sync_group) == (1, 0)
    assert strategy.run(lambda: v.read_value() * 2) == 4.0
    assert strategy.experimental_local_results(5) == (5,)
    update = strategy.extended.update(v, lambda held, x: held.assign(held * x), (1.0,), group=False)
    assert float(update[0]) == 2.0


def data_of_workers(strategy):
    """Every worker reads all data; an input function is told which worker it is on."""
    dataset = mpistrat.data.Dataset.range(6).batch(2)
    iterator = strategy.make_dataset_iterator(dataset)
    assert [batch.tolist() for batch in iterator] == [[0, 1], [2, 3], [4, 5]]
    told = []
    iterator = strategy.make_input_fn_iterator(lambda context: told.append(context) or dataset)
    assert iterator.get_next().tolist() == [0, 1]
    workers = workers_of(strategy)
    has_chief = "chief" in strategy.cluster_resolver.tasks()
    own = strategy.cluster_resolver.task_id + (has_chief and strategy.cluster_resolver.task_type == "worker")
    context = told[0]
    assert (context.num_input_pipelines, context.input_pipeline_id) == (workers, own)
    assert context.num_replicas_in_sync == 1
    assert strategy.rng(3).random() == np.random.default_rng(np.random.SeedSequence(3, spawn_key=(own,))).random()


def refusals(strategy):
    with strategy.scope():
        if strategy.is_chief:
            mpistrat.Variable([1.0], name="one")
        else:
            error = raised(lambda: mpistrat.Variable([1.0, 2.0], name="other"))
            assert isinstance(error, ValueError)
            for text in ("'other' of shape (2,)", "'one' of shape (1,)", "(worker", "same order"):
                assert text in str(error), error
    assert isinstance(raised(mpistrat.coordinator.ClusterCoordinator, strategy), ValueError)
    if strategy.cluster_resolver.task_type == "chief":
        error = raised(mpistrat.ParameterServerStrategy, strategy.cluster_resolver)
        assert "the other version" in str(error), error
    assert isinstance(raised(ParameterServerStrategy, MpiClusterResolver(jobs=other_jobs(strategy))), ValueError)


def other_jobs(strategy):
    jobs = {job: len(tasks) for job, tasks in strategy.cluster_resolver.tasks().items()}
    return (
        {"chief": 1, **jobs, "worker": jobs["worker"] - 1}
        if "chief" not in jobs
        else {"worker": jobs["worker"] + 1, "ps": jobs["ps"]}
    )


def variables_are_freed_when_all_have_dropped_them(strategy):
    with strategy.scope():
        probe = mpistrat.Variable(0.0)
        v = mpistrat.Variable(np.zeros(LARGE))
    meet(strategy)
    if not strategy.is_chief:
        del v
        gc.collect()
    meet(strategy)
    if strategy.is_chief:
        assert v.read_value().shape == (LARGE,)  # the others have dropped it, and this rank has not
        del v
        gc.collect()
        probe.read_value()  # tells the parameter servers
    meet(strategy)
    if len(strategy.extended.parameter_devices) == 1:  # else the two may be on different ones
        assert strategy.extended.update(probe, _arrays_held, group=False)[0] == 0


def _arrays_held(_):
    from mpistrat.variables.on_server import HeldVariable

    gc.collect()
    return sum(isinstance(each, HeldVariable) and each.shape == (LARGE,) for each in gc.get_objects())


def a_chief_that_ends_first(strategy):
    with strategy.scope():
        v = mpistrat.Variable(1.0)
        if strategy.is_chief:
            return
        error = raised(lambda: mpistrat.Variable(2.0))
    assert isinstance(error, RuntimeError)
    assert "has ended" in str(error), error
    assert float(v.assign_add(0.0)) == 1.0


def main(jobs):
    resolver = MpiClusterResolver(jobs=jobs)
    server = mpistrat.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id)
    if resolver.task_type == "ps":
        error = raised(ParameterServerStrategy, resolver)
        assert "Server" in str(error), error
        server.join()
        return
    if "chief" in jobs and resolver.task_type == "worker":
        error = raised(server.join)
        assert "which run the program" in str(error), error
    strategy = ParameterServerStrategy(resolver)
    assert strategy.cluster_resolver is resolver
    updates_of_all_workers_count(ParameterServerStrategy(resolver))
    optimizers_update_on_the_servers(strategy)
    contexts(strategy)
    data_of_workers(strategy)
    refusals(strategy)
    variables_are_freed_when_all_have_dropped_them(strategy)
    a_chief_that_ends_first(strategy)
    sys.stdout.write(f"{resolver.task_type} {resolver.task_id}: all checks passed\n")


if __name__ == "__main__":
    main({job: int(number) for job, number in (each.split("=") for each in sys.argv[1].split(","))})
