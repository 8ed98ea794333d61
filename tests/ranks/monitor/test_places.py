"""The flight record notes the line of each call, also where calls of one operation come from several lines."""

import sys

import numpy as np
import pytest

import mpistrat
from mpistrat.record import flight_record, layout, read

ONE = np.ones(1, np.float32)


@pytest.fixture
def strategy(comm):
    made = mpistrat.MultiWorkerMirroredStrategy(comm=comm)
    if made.extended.engine.topology.lock.flight is None:
        pytest.skip(f"the record has {layout.MOST_COMMUNICATORS} communicators of other tests")
    return made


def places(count):
    found = read.parse(flight_record.current().contents()).entries[-count:]
    return [each.place.split(":")[-1] for each in found]


def here():
    frame = sys._getframe(1)
    return f"{frame.f_lineno} in {frame.f_code.co_name}"


def test_one_operation_of_several_lines(strategy):
    expected = []
    for _ in range(3):
        strategy.reduce("SUM", ONE, axis=None), expected.append(here())
        strategy.reduce("SUM", ONE, axis=None), expected.append(here())
        strategy.run(lambda: mpistrat.get_replica_context().all_reduce("SUM", ONE) and expected.append(here()))
    assert places(9) == expected


def test_one_line_that_calls_through_several_functions(strategy):
    def directly(value):
        return strategy.reduce("SUM", value, axis=None)

    def in_a_function(value):
        return strategy.reduce("SUM", value, axis=None)

    for _ in range(2):
        for call in (directly, in_a_function, lambda value: in_a_function(value)):
            call(ONE)
    assert [place.split(" in ")[1] for place in places(6)] == ["directly", "in_a_function", "in_a_function"] * 2


def test_more_lines_than_the_record_keeps(strategy):
    """Texts give their places to others; a line that comes again gets a new one."""
    functions = []
    for i in range(layout.RECORD_TEXTS + 10):
        namespace = {"strategy": strategy, "ONE": ONE}
        code = f"def line_{i}():\n    strategy.reduce('SUM', ONE, axis=None)\n"
        exec(compile(code, "program", "exec"), namespace)
        functions.append(namespace[f"line_{i}"])
    for function in functions:
        function()
    for i in (0, 1, layout.RECORD_TEXTS, 0):
        functions[i]()
        assert places(1) == [f"2 in line_{i}"]
