"""Reads of two parameter servers, of which one publishes its memory, and the other cannot."""

import gc
import os
import sys
from contextlib import contextmanager

import numpy as np

import mpistrat
from mpistrat.cluster_resolver import MpiClusterResolver
from mpistrat.coordinator import ClusterCoordinator

SIZE = 30_000
CALLS = 60


@contextmanager
def messages(strategy):
    """The ranks that get messages in the block, one entry for each message."""
    mailbox, sent = strategy.contact.mailbox, []
    send = mailbox.send

    def noted(to, *arguments, **options):
        sent.append(to)
        send(to, *arguments, **options)

    mailbox.send = noted
    try:
        yield sent
    finally:
        mailbox.send = send


def only_one_server_is_asked(strategy):
    values = [np.arange(SIZE) * 1.0, np.float32(3), np.ones((0, 4)), np.arange(12).reshape(4, 3)] * 2
    with strategy.scope():
        variables = [mpistrat.Variable(each) for each in values]
        for each in values:  # each value on both servers
            with strategy.extended.colocate_vars_with(variables[1]):
                variables.append(mpistrat.Variable(each))
    values *= 2
    strategy.extended.batch_read(variables)
    for variable, value in zip(variables, values, strict=True):
        with messages(strategy) as sent:
            copy = variable.read_value()
            np.testing.assert_array_equal(copy, value)
            assert (copy.shape, copy.dtype) == (variable.shape, variable.dtype)
            copy[...] = 7  # a copy
            np.testing.assert_array_equal(variable.read_value(), value)
            if value.ndim == 2 and len(value):
                np.testing.assert_array_equal(variable.sparse_read([3, 0, 3]), value[[3, 0, 3]])
                np.testing.assert_array_equal(variable[1], value[1])
                np.testing.assert_array_equal(variable[::-2, 1], value[::-2, 1])
        servers = {strategy.contact.roles.parameter_servers[1]} if variable.device.endswith(":1") else set()
        assert {*sent} == servers, (variable.device, sent)
    with messages(strategy) as sent:
        for found, value in zip(strategy.extended.batch_read(variables), values, strict=True):
            np.testing.assert_array_equal(found, value)
    assert len(sent) == 1
    for variable in variables:
        variable.assign_add(np.ones(variable.shape, variable.dtype))
    for found, value in zip(strategy.extended.batch_read(variables), values, strict=True):
        np.testing.assert_array_equal(found, value + 1)


def reads_see_whole_writes(strategy):
    """While a worker writes and reads, each read has the values of one moment of each server."""
    with strategy.scope():
        variables = [mpistrat.Variable(np.zeros(SIZE)) for _ in range(4)]
    coordinator = ClusterCoordinator(strategy)

    def add_one(held):
        held.assign_add(np.ones(SIZE))

    def step():
        strategy.extended.batch_update([(v, add_one, ()) for v in variables])
        return check()

    def check():
        values = strategy.extended.batch_read(variables)
        for own in (values[::2], values[1::2]):
            assert len({float(x) for value in own for x in (value.min(), value.max())}) == 1
        return float(values[0][0])

    results = [coordinator.schedule(step) for _ in range(CALLS)]
    seen = []
    while not coordinator.done():
        seen.append(check())
    assert seen == sorted(seen)
    assert [value.fetch() for value in results] == [*range(1, CALLS + 1)]  # each sees its own write


def later_variables_are_read_too(strategy):
    for size in (1, SIZE, 1):
        with strategy.scope():
            v = mpistrat.Variable(np.full(size, 2.0))
            mpistrat.Variable(0.0)
        v.assign(v * 2)
        assert v.read_value().tolist() == [4.0] * size


def a_worker_keeps_a_variable_that_was_dropped(strategy):
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        v, other = mpistrat.Variable([1.0, 2.0]), mpistrat.Variable(0.0)

    def keep(variable):
        sys.kept = variable
        return variable.read_value().tolist()

    assert coordinator.fetch(coordinator.schedule(keep, (v,))) == [1.0, 2.0]
    del v
    gc.collect()
    other.assign(1.0)  # the next message to its server tells that it is free
    try:
        coordinator.fetch(coordinator.schedule(lambda: sys.kept.read_value().tolist()))
    except KeyError:
        return
    raise AssertionError("a variable that was dropped was read")


def main():
    resolver = MpiClusterResolver(jobs={"chief": 1, "worker": 1, "ps": 2})
    if resolver.task_type != "chief":
        if (resolver.task_type, resolver.task_id) == ("ps", 1):
            del os.memfd_create
        mpistrat.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
        return
    strategy = mpistrat.ParameterServerStrategy(resolver)
    for check in CHECKS:
        check(strategy)
    sys.stdout.write("all checks passed\n")


CHECKS = (
    only_one_server_is_asked,
    reads_see_whole_writes,
    later_variables_are_read_too,
    a_worker_keeps_a_variable_that_was_dropped,
)

if __name__ == "__main__":
    main()
