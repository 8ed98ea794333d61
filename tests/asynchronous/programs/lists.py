"""Lists of variables on 2 parameter servers, read and updated by one message to each: ``python lists.py``."""

import sys

import numpy as np
from raised import raised

import mpistrat
from mpistrat.cluster_resolver import MpiClusterResolver
from mpistrat.coordinator import ClusterCoordinator
from mpistrat.experimental import partitioners

RANDOM = np.random.default_rng(3)
SHAPES = ((), (3,), (5, 7), (300, 200), (0, 4), (1,), (70_000,))  # from bytes to more than a message carries inside


def same(values, expected):
    for value, each in zip(values, expected, strict=True):
        np.testing.assert_array_equal(value, each)


def reads(strategy):
    arrays = [RANDOM.integers(-99, 99, size=shape).astype(float) for shape in SHAPES]  # sums are exact
    with strategy.scope():
        variables = [mpistrat.Variable(each) for each in arrays]
    read = strategy.extended.batch_read
    same(read(variables), arrays)
    same(read([variables[3], variables[0], variables[3]]), [arrays[3], arrays[0], arrays[3]])
    assert read([]) == []
    value = read(variables)[3]
    value[...] = 0.0  # a copy
    same(read(variables), arrays)
    same(ClusterCoordinator(strategy).schedule(read, (variables,)).fetch(), arrays)
    assert isinstance(raised(read, [variables[0], 1.0]), TypeError)
    return variables, arrays


def updates(strategy, variables, arrays):
    def add(held, delta):
        held.assign_add(delta)
        return held.array

    def twice():
        calls = [(v, add, (2 * each,)) for v, each in zip(variables, arrays, strict=True)]
        return strategy.extended.batch_update([*calls, *calls], group=False)

    results = twice()
    assert len(results) == 2 * len(variables)
    # A result is that of its own call, though a later call changes the array.
    for i, each in enumerate(arrays):
        parts = [part for (part,) in results[i :: len(arrays)]]
        whole = [np.concatenate(part) if isinstance(part, tuple) else part for part in parts]
        same(whole, [3 * each, 5 * each])
    same(strategy.extended.batch_read(variables), [5 * each for each in arrays])
    ClusterCoordinator(strategy).schedule(lambda: twice() and None).fetch()
    same(strategy.extended.batch_read(variables), [9 * each for each in arrays])


def errors(strategy):
    """An error of one is raised, and the others are done."""
    with strategy.scope():
        v, w, x = (mpistrat.Variable([1.0, 2.0]) for _ in range(3))

    def add_one(held):
        held.assign_add(np.ones(2))

    def fail(held):
        raise LookupError(held.name)

    error = raised(strategy.extended.batch_update, [(v, add_one, ()), (w, fail, ()), (x, add_one, ())])
    assert isinstance(error, LookupError)
    assert "(ps " in str(error.__cause__)
    same(strategy.extended.batch_read([v, w, x]), [[2.0, 3.0], [1.0, 2.0], [2.0, 3.0]])
    other = mpistrat.Variable(1.0)
    assert isinstance(raised(strategy.extended.batch_update, [(v, add_one, ()), (other, add_one, ())]), ValueError)
    same(strategy.extended.batch_read([v]), [[2.0, 3.0]])  # wrong arguments: nothing is done


def slices(strategy, divided):
    """``v[key].assign(value)`` travels as the part that is written; a divided variable names its shards."""
    start = np.arange(12.0).reshape(4, 3)
    with strategy.scope():
        v = mpistrat.Variable(start, name="kernel")
    for shard in v.shards:
        assert shard[0, 1:].assign([7.0, 8.0]) is shard
        assert shard[0].tolist()[1:] == [7.0, 8.0]
    if divided:
        assert "assign to a shard" in str(raised(lambda: v[0].assign(1.0)))
        return
    ClusterCoordinator(strategy).schedule(lambda: v[2].assign(1.0) is None).fetch()
    start[0, 1:], start[2] = [7.0, 8.0], 1.0
    same([v], [start])


def moments(strategy):
    """Of the variables of a parameter server, the values of one read belong together."""
    with strategy.scope():
        variables = [mpistrat.Variable(np.zeros(20_000)) for _ in range(6)]
    coordinator = ClusterCoordinator(strategy, progress=True)

    def add_one(held):
        held.assign_add(np.ones(20_000))

    def step():
        strategy.extended.batch_update([(v, add_one, ()) for v in variables])

    for _ in range(100):
        coordinator.schedule(step)
    for _ in range(100):
        values = strategy.extended.batch_read(variables)
        for own in (values[::2], values[1::2]):
            assert len({float(x) for value in own for x in (value.min(), value.max())}) == 1
    coordinator.join()
    same(strategy.extended.batch_read(variables), [np.full(20_000, 100.0)] * 6)


def main():
    resolver = MpiClusterResolver(jobs={"chief": 1, "worker": 1, "ps": 2})
    if resolver.task_type != "chief":
        mpistrat.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
        return
    for partitioner in (None, partitioners.FixedShardsPartitioner(3)):
        strategy = mpistrat.ParameterServerStrategy(resolver, partitioner)
        updates(strategy, *reads(strategy))
        slices(strategy, partitioner is not None)
    strategy = mpistrat.ParameterServerStrategy(resolver)
    errors(strategy)
    moments(strategy)
    sys.stdout.write("all checks passed\n")


if __name__ == "__main__":
    main()
