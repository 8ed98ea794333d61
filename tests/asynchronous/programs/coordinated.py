"""Programs with roles: ``python coordinated.py NAME`` runs the function of that name on the coordinator."""

import sys
import traceback

import hypothesis
import numpy as np
from hypothesis import strategies as st
from raised import raised

import mpistrat
from mpistrat.cluster_resolver import MpiClusterResolver
from mpistrat.coordinator import CancelledError, ClusterCoordinator, Executor, PerWorkerValue
from mpistrat.experimental import partitioners

RANDOM = np.random.default_rng(1)


def resolver_of(ps):
    from mpi4py import MPI

    return MpiClusterResolver(jobs={"chief": 1, "worker": MPI.COMM_WORLD.size - 1 - ps, "ps": ps})


# --- variables and optimizers on 2 parameter servers ---------------------------------------------------


def training(resolver):
    optimizers_update_on_the_servers(resolver)
    changed_rates_reach_scheduled_functions(resolver)
    changes_that_scheduled_functions_do_not_see_are_refused(resolver)
    rules_of_whole_gradients_are_refused(resolver)
    a_read_sees_whole_writes(resolver)
    writes_of_all_kinds(resolver)
    large_arrays(resolver)
    values_of_workers(resolver)
    wrong_arguments(resolver)
    files(resolver)


def optimizers_update_on_the_servers(resolver):
    """As many steps as a serial optimizer takes, on whole and on divided variables, dense and sparse."""
    makers = (
        lambda: mpistrat.optimizers.SGD(0.1, momentum=0.9),
        lambda: mpistrat.optimizers.Adam(0.1, clipnorm=0.5),
        lambda: mpistrat.optimizers.AdamW(0.1, use_ema=True, ema_momentum=0.5),
    )
    for make in makers:
        for partitioner in (None, partitioners.FixedShardsPartitioner(2)):
            optimizer_updates_on_the_servers(mpistrat.ParameterServerStrategy(resolver, partitioner), make)


def optimizer_updates_on_the_servers(strategy, make):
    coordinator = ClusterCoordinator(strategy)
    start = RANDOM.normal(size=(5, 2))
    gradients = [*RANDOM.normal(size=(4, 5, 2)), mpistrat.IndexedSlices(np.ones((3, 2)), [4, 0, 4])]
    with strategy.scope():
        v, optimizer = mpistrat.Variable(start), make()
        optimizer.build([v])
    for slot in optimizer.variables[2:]:
        assert slot.device == v.device, (slot, v)

    def step(gradient):
        strategy.run(lambda: optimizer.apply_gradients([(gradient, v)]))

    for gradient in gradients:
        coordinator.schedule(step, args=(gradient,))
        coordinator.join()
    oracle, serial = mpistrat.Variable(start), make()
    for gradient in gradients:
        serial.apply_gradients([(gradient, oracle)])
    np.testing.assert_allclose(v.numpy(), oracle.numpy(), rtol=1e-12)
    assert optimizer.iterations == serial.iterations == 5
    for each, variable in ((optimizer, v), (serial, oracle)):
        each.finalize_variable_values([variable])
    np.testing.assert_allclose(v.numpy(), oracle.numpy(), rtol=1e-12)


def changed_rates_reach_scheduled_functions(resolver):
    """Also a function that was sent before the change, and after a schedule took the place of a number."""
    strategy = mpistrat.ParameterServerStrategy(resolver)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        v, optimizer = mpistrat.Variable(0.0), mpistrat.optimizers.SGD(1.0)
        optimizer.build([v])

    def step():
        strategy.run(lambda: optimizer.apply_gradients([(1.0, v)]))

    def step_of(given):
        strategy.run(lambda: given.apply_gradients([(1.0, v)]))

    for rate, expected in ((1.0, -1.0), (0.125, -1.125), (0.5, -1.625)):
        optimizer.learning_rate = rate
        coordinator.schedule(step)
        coordinator.join()
        assert float(v) == expected, (rate, float(v))
    for rate, expected in ((1.0, -2.625), (0.125, -2.75)):
        optimizer.learning_rate.assign(rate)
        coordinator.schedule(step_of, args=(optimizer,))
        coordinator.join()
        assert float(v) == expected, (rate, float(v))
    assert optimizer.learning_rate == optimizer.get_config()["learning_rate"] == 0.125


class Scaled(mpistrat.optimizers.Optimizer):
    def __init__(self, scale):
        super().__init__(1.0)
        self.scale = scale

    def update(self, weights, gradient, step, rate, *state):
        weights -= rate * self.scale * gradient


def changes_that_scheduled_functions_do_not_see_are_refused(resolver):
    """A worker keeps the optimizer as it was sent, but for its variables."""
    strategy = mpistrat.ParameterServerStrategy(resolver)
    for made, name, value in (
        (mpistrat.optimizers.SGD(1.0), "learning_rate", lambda step: 0.5),
        (mpistrat.optimizers.SGD(lambda step: 1.0), "learning_rate", 0.5),
        (Scaled(1.0), "scale", 0.5),
    ):
        with strategy.scope():
            made.build([mpistrat.Variable(0.0)])
        assert "scheduled functions keep" in str(raised(setattr, made, name, value))


class Norm(mpistrat.optimizers.Optimizer):
    def update(self, weights, gradient, step, rate, *state):
        weights -= rate * gradient / np.linalg.norm(gradient)


def rules_of_whole_gradients_are_refused(resolver):
    """A norm of each shard would make the result depend on the number of shards."""
    gradient = np.array([[3.0, 4.0], [0.0, 12.0]])
    for make in (lambda: mpistrat.optimizers.LARS(1.0), lambda: Norm(1.0)):
        for shards in (1, 2):
            strategy = mpistrat.ParameterServerStrategy(resolver, partitioners.FixedShardsPartitioner(shards))
            with strategy.scope():
                v, optimizer = mpistrat.Variable(np.ones((2, 2))), make()
                error = raised(optimizer.build, [v]) if shards == 2 else optimizer.build([v])
            if shards == 2:
                assert isinstance(error, ValueError)
                assert "cut over 2 parameter servers" in str(error)
                assert "variable_partitioner" in str(error)
                continue
            compare_with_serial(strategy, v, optimizer, make(), gradient)
    strategy = mpistrat.ParameterServerStrategy(resolver, partitioners.FixedShardsPartitioner(2))
    with strategy.scope():
        v, optimizer = mpistrat.Variable(np.ones((2, 2))), mpistrat.optimizers.Adam(0.1, global_clipnorm=0.5)
        optimizer.build([v])
    compare_with_serial(strategy, v, optimizer, mpistrat.optimizers.Adam(0.1, global_clipnorm=0.5), gradient)


def compare_with_serial(strategy, v, optimizer, serial, gradient):
    coordinator, oracle = ClusterCoordinator(strategy), mpistrat.Variable(v.numpy())
    coordinator.schedule(lambda: strategy.run(lambda: optimizer.apply_gradients([(gradient, v)]))).fetch()
    serial.apply_gradients([(gradient, oracle)])
    np.testing.assert_allclose(v.numpy(), oracle.numpy(), rtol=1e-12)


def a_read_sees_whole_writes(resolver):
    strategy = mpistrat.ParameterServerStrategy(resolver)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        v = mpistrat.Variable(np.zeros(200_000))

    def write(x):
        v.assign(np.full(200_000, x))
        v.assign_add(np.ones(200_000))

    for i in range(20):
        coordinator.schedule(write, args=(float(i),))
        assert len({*v.numpy()}) == 1
    coordinator.join()
    assert v.numpy()[0] == 20.0


def writes_of_all_kinds(resolver):
    """Every write and read gives what a plain variable gives, on whole and on divided variables."""
    for partitioner in (None, partitioners.FixedShardsPartitioner(2)):
        writes_to(mpistrat.ParameterServerStrategy(resolver, partitioner), divided=partitioner is not None)
    with mpistrat.ParameterServerStrategy(resolver).scope():
        empty, number = mpistrat.Variable(np.zeros((0, 3))), mpistrat.Variable(3)
    assert empty.numpy().shape == (0, 3)
    number.assign_add(2)
    assert int(number) == 5


def writes_to(strategy, divided):
    with strategy.scope():
        v = mpistrat.Variable(np.arange(14.0).reshape(7, 2), name="v")
    u = mpistrat.Variable(np.arange(14.0).reshape(7, 2))
    for method in ("assign", "assign_add", "assign_sub"):
        value = RANDOM.normal(size=(7, 2))
        getattr(v, method)(value), getattr(u, method)(value)
    v.assign(v * 2), u.assign(u * 2)
    for method in ("add", "sub", "mul", "div", "min", "max", "update"):
        rows = mpistrat.IndexedSlices(RANDOM.normal(size=(3, 2)), [6, 1, 3])
        getattr(v, f"scatter_{method}")(rows), getattr(u, f"scatter_{method}")(rows)
    np.testing.assert_array_equal(v.numpy(), u.numpy())
    np.testing.assert_array_equal(v.sparse_read([[6, 0], [0, 3]]), u.sparse_read([[6, 0], [0, 3]]))
    np.testing.assert_array_equal(v.gather_nd([[6, 1], [0, 0]]), u.gather_nd([[6, 1], [0, 0]]))
    for key in (-1, slice(None, None, -2), (slice(1, 6), 1), ..., np.arange(7) % 2 == 0, [0, 5], slice(3, 3)):
        np.testing.assert_array_equal(v[key], u[key])
    before = v.numpy()
    assert type(raised(lambda: v.assign(np.zeros((8, 2))))) is ValueError
    assert type(raised(lambda: v.assign(np.zeros((7, 2), complex)))) is TypeError
    assert type(raised(lambda: v.scatter_add(mpistrat.IndexedSlices(np.ones((1, 2)), [7])))) is ValueError
    np.testing.assert_array_equal(v.numpy(), before)
    if not divided:
        v[2:4], u[2:4] = 5.0, 5.0
        np.testing.assert_array_equal(v.numpy(), u.numpy())
    else:
        assert type(raised(lambda: v.__setitem__(0, 1.0))) is TypeError
        assert [each.name for each in v.variables] == ["v/part_0", "v/part_1"]


def large_arrays(resolver):
    """Arguments and results that do not fit into one message's frame, unchanged by later writes of the program."""
    coordinator = ClusterCoordinator(mpistrat.ParameterServerStrategy(resolver))
    array = np.zeros(1_000_000)
    results = []
    for i in range(8):
        array[:] = i
        results.append(coordinator.schedule(lambda x: [x, {"twice": x * 2}, "text", None], args=(array,)))
    for i, (one, two, text, nothing) in enumerate(coordinator.fetch(results)):
        assert (one == i).all()
        assert (two["twice"] == 2 * i).all()
        assert (text, nothing) == ("text", None)
        one += 1  # an array of the coordinator's own


def values_of_workers(resolver):
    strategy = mpistrat.ParameterServerStrategy(resolver)
    coordinator = ClusterCoordinator(strategy)
    calls = coordinator.create_per_worker_resource(list)
    assert coordinator.schedule(lambda kept: kept.append(1) or len(kept), args=(calls,)).fetch() == 1
    assert coordinator.schedule(lambda kept: kept.append(1) or len(kept), args=([calls],)).fetch is not None
    coordinator.join()
    broken = coordinator.create_per_worker_resource(lambda: 1 / 0)
    assert type(raised(coordinator.schedule(lambda x: x, args=(broken,)).fetch)) is ZeroDivisionError
    assert type(raised(coordinator.join)) is ZeroDivisionError
    own = PerWorkerValue([coordinator.schedule(lambda: 7)])
    assert coordinator.schedule(lambda x: x + 1, kwargs={"x": own}).fetch() == 8
    two = PerWorkerValue([coordinator.schedule(lambda: 7)] * 2)
    assert type(raised(lambda: coordinator.schedule(lambda x: x, args=(two,)))) is ValueError
    with strategy.scope():
        v = mpistrat.Variable([1.0, 2.0])
    assert coordinator.schedule(lambda: [v, 1]).fetch()[0].tolist() == [1.0, 2.0]
    assert coordinator.schedule(lambda: strategy.experimental_local_results(v)).fetch() is not None


def wrong_arguments(resolver):
    import threading

    strategy = mpistrat.ParameterServerStrategy(resolver)
    coordinator = ClusterCoordinator(strategy)
    guard = threading.Lock()
    error = raised(lambda: coordinator.schedule(lambda: guard.locked()))
    assert type(error) is TypeError
    assert "'guard'" in str(error)
    assert type(raised(lambda: coordinator.schedule(lambda x: x, args=(guard,)))) is TypeError
    result = coordinator.schedule(lambda: __import__("threading").Lock())  # cannot be sent back
    assert isinstance(raised(result.fetch), TypeError)
    assert isinstance(raised(coordinator.join), TypeError)
    error = raised(coordinator.schedule(lambda: sys.exit(3)).fetch)
    assert type(error) is RuntimeError
    assert "rank 1 (worker 0)" in str(error.__cause__)
    raised(coordinator.join)
    plain = mpistrat.Variable(1.0)
    assert type(raised(lambda: coordinator.schedule(lambda: plain.numpy()))) is TypeError
    with strategy.scope():
        v, u = mpistrat.Variable([1.0]), mpistrat.Variable([2.0])  # on different servers
    with strategy.scope():
        assert type(raised(lambda: strategy.extended.update(v, lambda a, b: a.assign(b), (u,)))) is ValueError
        assert type(raised(lambda: strategy.extended.update(v, lambda a: a.assign(u)))) is RuntimeError
        assert type(raised(lambda: strategy.extended.update(v, lambda a: 1 / 0))) is ZeroDivisionError
    other = mpistrat.ParameterServerStrategy(resolver)
    error = raised(ClusterCoordinator(other).schedule(lambda: v.assign([3.0]) and None).fetch)
    assert type(error) is RuntimeError
    assert "belongs to" in str(error)
    raised(ClusterCoordinator(other).join)
    other_jobs = MpiClusterResolver(jobs={"chief": 1, "worker": 2, "ps": 1})
    assert type(raised(lambda: mpistrat.ParameterServerStrategy(other_jobs))) is ValueError
    import pickle

    for thing in (v, strategy):
        assert type(raised(lambda thing=thing: pickle.dumps(thing))) is TypeError


def files(resolver):
    """A file has one array for each variable, whatever its shards."""
    import pathlib
    import tempfile

    value = RANDOM.normal(size=(7, 3))
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "weights.h5"
        with mpistrat.ParameterServerStrategy(resolver, partitioners.FixedShardsPartitioner(3)).scope():
            v, u = mpistrat.Variable(value), mpistrat.Variable(value * 0)
        mpistrat.training.save({"w": v}, path)
        plain = mpistrat.Variable(value * 0)
        mpistrat.training.load({"w": plain}, path)
        mpistrat.training.load({"w": u}, path)
        manager = mpistrat.training.CheckpointManager(mpistrat.training.Checkpoint(v=v), folder, max_to_keep=1)
        kept = [manager.save() for _ in range(2)][-1]
        assert mpistrat.training.latest_checkpoint(folder) == kept  # outside of a scope, where no worker would come
        np.testing.assert_array_equal(mpistrat.training.load_arrays(kept)["v"], value)
    np.testing.assert_array_equal(plain.numpy(), value)
    np.testing.assert_array_equal(u.numpy(), value)


# --- random schedules on 2 workers ---------------------------------------------------------------------

CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(-3, 3)),
        st.tuples(st.just("fail"), st.just(0)),
        st.tuples(st.sampled_from(["join", "done", "fetch", "read"]), st.just(0)),
    ),
    max_size=25,
)


def schedules(resolver):
    """Whatever the order of calls: every value has an answer, sums are right, errors are raised once."""
    strategy = mpistrat.ParameterServerStrategy(resolver)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        v = mpistrat.Variable(0)

    def add(x):
        v.assign_add(x)
        return x

    def fail(x):
        raise ArithmeticError(x)

    functions = {"add": add, "fail": fail}

    @hypothesis.settings(
        max_examples=60,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(CALLS)
    def check(calls):
        v.assign(0)
        results, raised_errors = [], 0
        for call, x in [*calls, ("join", 0)]:
            try:
                if call in functions:
                    results.append((call, x, coordinator.schedule(functions[call], args=(x,))))
                elif call == "join":
                    coordinator.join()
                elif call == "done":
                    coordinator.done()
                elif call == "read":
                    v.read_value()
                elif results and results[-1][0] == "add":
                    results[-1][2].fetch()
            except CancelledError:
                assert call == "fetch"
            except ArithmeticError:
                assert call in ("add", "fail", "join", "done")
                raised_errors += 1
        total, failed = 0, 0
        for call, _, result in results:  # all have ended
            try:
                total += result.fetch()
                assert call == "add"
            except ArithmeticError:
                failed += 1
                assert call == "fail"
            except CancelledError:
                assert failed or raised_errors
        assert total == int(v)
        assert bool(failed) == bool(raised_errors)
        assert raised_errors <= failed
        assert coordinator.done()
        coordinator.join()

    check()


def main(name):
    resolver = resolver_of(ps={"training": 2, "schedules": 1}[name])
    if resolver.task_type != "chief":
        mpistrat.Server(resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id).join()
        return
    globals()[name](resolver)
    print("all checks passed")


# --- a farm of all ranks -------------------------------------------------------------------------------


def square(x):
    return x * x


def farm():
    import concurrent.futures
    import operator
    import time

    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    with Executor(comm) as executor:
        if executor is None:
            print("serving rank is free")
            return
        assert list(executor.map(square, range(50))) == [i * i for i in range(50)]
        assert list(executor.map(operator.add, range(23), range(23), chunksize=4)) == [2 * i for i in range(23)]
        futures = [executor.submit(square, i) for i in range(20)]
        assert {f.result() for f in concurrent.futures.as_completed(futures, timeout=250)} == {i * i for i in range(20)}
        error = raised(executor.submit(lambda: {}["missing"]).result)
        assert type(error) is KeyError
        assert "(worker" in str(error.__cause__)
        big = executor.submit(np.arange, 3_000_000).result()
        assert big.size == 3_000_000
        slow = [executor.submit(time.sleep, 0.3) for _ in range(comm.size - 1)]
        queued = [executor.submit(square, i) for i in range(10)]
        assert queued[-1].cancel()
        assert isinstance(raised(queued[-1].result), concurrent.futures.CancelledError) or queued[-1].cancelled()
        assert [f.result() for f in queued[:-1]] == [i * i for i in range(9)]
        assert all(f.result() is None for f in slow)
        many = [executor.submit(time.sleep, 0.05) for _ in range(40)]
        executor.shutdown(cancel_futures=True)
        assert all(f.done() for f in many)
        assert any(f.cancelled() for f in many)
        assert type(raised(lambda: executor.submit(square, 1))) is RuntimeError


def retried():
    from mpi4py import MPI

    with Executor(MPI.COMM_WORLD, retries=2) as executor:
        if executor is None:
            return
        count = executor.submit(fails_twice)
        assert count.result() == 3
        assert type(raised(executor.submit(lambda: 1 / 0).result)) is ZeroDivisionError
    print("all checks passed")


def fails_twice(calls=[]):  # noqa: B006 - kept by the worker
    calls.append(1)
    if len(calls) < 3:
        raise OSError("not yet")
    return len(calls)


if __name__ == "__main__":
    try:
        if sys.argv[1] == "farm":
            farm()
            retried()
        else:
            main(sys.argv[1])
    except Exception:
        traceback.print_exc()
        raise
