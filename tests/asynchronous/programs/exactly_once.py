"""Functions whose writes count once, without a loss: ``mpistrat run -n 4 exactly_once.py``."""

import sys

import numpy as np

import mpistrat
from mpistrat.cluster_resolver import MpiClusterResolver
from mpistrat.coordinator import ClusterCoordinator
from mpistrat.experimental.partitioners import FixedShardsPartitioner

CALLS = 12


def add(variable, value):
    variable.assign_add(value)


def own_writes_are_read(coordinator, variables):
    number, rows, cut = variables
    strategy = coordinator.strategy

    def function(i):
        before = number.numpy()
        number.assign_add(1)
        assert number.numpy() == before + 1
        number.assign_add(1)
        assert number.numpy() == before + 2
        updated = strategy.extended.update(rows, add, args=(np.ones((5, 2)),), group=False)
        assert updated == (None,), updated
        old = rows.numpy()
        rows.scatter_add(mpistrat.IndexedSlices(np.ones((1, 2)), np.array([3])))
        rows[0] = 5.0
        assert (rows.numpy()[3] == old[3] + 1).all()
        assert (rows.sparse_read([0]) == 5).all()
        given = np.full((5, 2), 1.0)
        cut.assign_add(given)
        given[:] = 100.0  # what was written stays
        cut.scatter_sub(mpistrat.IndexedSlices(np.ones((2, 2)), np.array([4, 0])))
        assert (cut[1:4] >= 1).all()
        return i, number

    values = [coordinator.schedule(function, args=(i,)) for i in range(CALLS)]
    coordinator.join()
    results = coordinator.fetch(values)
    assert [i for i, _ in results] == [*range(CALLS)]
    assert sorted(int(value) for _, value in results)[-1] == 2 * CALLS
    assert number.numpy() == 2 * CALLS
    expected = np.full((5, 2), float(CALLS))
    expected[3] *= 2
    expected[0] = 5
    np.testing.assert_array_equal(rows.numpy(), expected)
    expected = np.full((5, 2), float(CALLS))
    expected[[0, 4]] = 0
    np.testing.assert_array_equal(cut.numpy(), expected)


def a_function_that_fails_writes_nothing(coordinator, variables):
    number, rows, cut = variables
    before = [each.numpy() for each in variables]

    def raises():
        number.assign_add(1)
        cut.assign_add(np.ones((5, 2)))
        raise ArithmeticError("on purpose")

    def does_not_fit():
        number.assign_add(1)
        cut.assign_add(np.ones((5, 2)))
        rows[9] = 1.0

    def cannot_be_sent():
        number.assign_add(1)
        return (i for i in range(3))

    for function, error in ((raises, ArithmeticError), (does_not_fit, IndexError), (cannot_be_sent, TypeError)):
        coordinator.schedule(function)
        try:
            coordinator.join()
        except error:
            pass
        else:
            raise AssertionError(f"{function.__name__} has not raised {error.__name__}")
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def a_function_sees_the_one_before(coordinator, variables):
    number = variables[0]
    before = int(number.numpy())

    def count():
        number.assign(number.numpy() + 1)

    for _ in range(50):
        coordinator.schedule(count)
    coordinator.join()
    assert number.numpy() == before + 50


def optimizers_step_once(coordinator, variables):
    with coordinator.strategy.scope():
        weights = [mpistrat.Variable(np.arange(3.0)), mpistrat.Variable(np.ones((2, 2)))]
        optimizer = mpistrat.optimizers.Adam(0.1)
        optimizer.build(weights)
    serial = [mpistrat.Variable(each.numpy()) for each in weights]
    alone = mpistrat.optimizers.Adam(0.1)

    def step():
        for i in range(2):
            gradients = [2 * weights[0].numpy() + i, np.ones((2, 2))]
            pairs = [*zip(gradients, weights, strict=True)]
            coordinator.strategy.run(optimizer.apply_gradients, args=(pairs,))

    for _ in range(3):
        coordinator.schedule(step).fetch()
        for i in range(2):
            gradients = [2 * serial[0].numpy() + i, np.ones((2, 2))]
            alone.apply_gradients(zip(gradients, serial, strict=True))
    for found, expected in zip(weights, serial, strict=True):
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-12)
    assert optimizer.iterations == 6


def main():
    resolver = MpiClusterResolver(jobs={"chief": 1, "worker": 1, "ps": 2})
    if resolver.task_type != "chief":
        spec = resolver.cluster_spec()
        mpistrat.Server(spec, job_name=resolver.task_type, task_index=resolver.task_id).join()
        return
    strategy = mpistrat.ParameterServerStrategy(resolver, variable_partitioner=FixedShardsPartitioner(2))
    coordinator = ClusterCoordinator(strategy, exactly_once=True)
    assert coordinator.exactly_once
    assert ClusterCoordinator(strategy) is coordinator
    with strategy.scope():
        variables = [mpistrat.Variable(0)]
        with strategy.extended.colocate_vars_with(variables[0]):
            variables.append(mpistrat.Variable(np.zeros((5, 2))))
        variables.append(mpistrat.Variable(np.zeros((5, 2))))
    for check in (
        own_writes_are_read,
        a_function_that_fails_writes_nothing,
        a_function_sees_the_one_before,
        optimizers_step_once,
    ):
        check(coordinator, variables)
        sys.stdout.write(f"passed: {check.__name__}\n")


if __name__ == "__main__":
    main()
