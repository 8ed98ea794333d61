"""Writes that wait on a parameter server until the coordinator decides: applied once, or not at all."""

import numpy as np
import pytest

from mpistrat import IndexedSlices, Variable
from mpistrat.messages.mailbox import ReceivedMessage
from mpistrat.messages.pickling import EMPTY, pack, unpack
from mpistrat.variables.exactly_once import PreparedWrites, Write, pack_writes, unpack_writes
from mpistrat.variables.on_server import VariableStore

WORKER, COORDINATOR = 3, 0


class Sent:
    """A mailbox that keeps what is sent."""

    def __init__(self):
        self.messages = []

    def send(self, to, kind, head=(), body=None):
        self.messages.append((to, kind, head, body))

    def answer(self, message, value):
        self.messages.append((message.source, "value", message.head[:1], value))

    def refuse(self, message, error, where):
        self.messages.append((message.source, "error", message.head[:1], error))


class Server:
    """A parameter server with one variable, whose key is 7."""

    def __init__(self, value):
        self.variable, self.mailbox, self.store = Variable(value), Sent(), VariableStore()
        self.variable.key = 7
        self.store.hold(self.variable, np.array(value))
        self._prepared = PreparedWrites(self.store)

    def gets(self, kind, *head, source=COORDINATOR, body=EMPTY):
        assert self._prepared.takes(kind)
        self._prepared.handle(self.mailbox, ReceivedMessage(source, kind, head, body), "here")
        return self.mailbox.messages.pop() if self.mailbox.messages else None

    def prepares(self, number, *writes):
        body = pack_writes([Write(7, method, b"", pack(value)[0]) for method, value in writes])
        return self.gets("prepare", 0, number, source=WORKER, body=body)

    @property
    def value(self):
        return self.store.array(7).tolist()


@pytest.fixture
def server():
    return Server([1.0, 2.0])


def test_writes_wait_for_the_decision(server):
    assert server.prepares(5, ("assign_add", [1.0, 1.0]), ("setitem", (0, 9.0)))[:2] == (WORKER, "value")
    assert server.value == [1, 2]
    assert server.gets("commit", 5)[:3] == (COORDINATOR, "committed", (5,))
    assert server.value == [9, 3]


def test_aborted_writes_are_dropped(server):
    server.prepares(5, ("assign", [0.0, 0.0]))
    server.prepares(6, ("assign_add", [1.0, 1.0]))
    assert server.gets("abort", 5) is None
    server.gets("commit", 6)
    assert server.value == [2, 3]


def test_writes_of_a_lost_worker_that_arrive_late_are_dropped(server):
    server.gets("abort", 5)
    assert server.prepares(5, ("assign", [0.0, 0.0])) is None
    with pytest.raises(KeyError):
        server.gets("commit", 5)
    assert server.value == [1, 2]


def test_two_calls_of_one_function_count_under_two_numbers(server):
    server.prepares(5, ("assign_add", [1.0, 1.0]))
    server.gets("abort", 5)  # its worker was lost, so it runs again
    server.prepares(8, ("assign_add", [1.0, 1.0]))
    server.gets("commit", 8)
    assert server.value == [2, 3]
    with pytest.raises(KeyError):  # a number is applied once
        server.gets("commit", 8)


@pytest.mark.parametrize(
    ("method", "value", "error"),
    [
        ("assign", [1.0], ValueError),
        ("assign_add", np.ones(2, complex), TypeError),
        ("scatter_add", IndexedSlices(np.ones(1), np.array([2])), ValueError),
        ("setitem", (5, 1.0), IndexError),
        ("setitem", (slice(None), [1.0, 2.0, 3.0]), ValueError),
    ],
)
def test_a_write_that_does_not_fit_is_refused_before_the_decision(server, method, value, error):
    _, kind, _, raised = server.prepares(5, ("assign", [0.0, 0.0]), (method, value))
    assert kind == "error"
    assert isinstance(raised, error)
    server.gets("abort", 5)
    assert server.value == [1, 2]


def test_an_update_function_that_raises_is_told_at_the_commit(server):
    def fail(variable):
        raise ArithmeticError("on purpose")

    packed, _ = pack(fail, copy=True)
    server.store.handle(server.mailbox, ReceivedMessage(WORKER, "function", (b"f", None), packed), "here")
    body = pack_writes([Write(7, None, b"f", pack(((), {}))[0])])
    assert server.gets("prepare", 0, 5, source=WORKER, body=body)[1] == "value"
    _, kind, _, failure = server.gets("commit", 5)
    assert kind == "committed"
    with pytest.raises(ArithmeticError, match="on purpose"):
        raise unpack(failure).error()


def test_arrays_travel_beside_the_writes():
    large, small = np.arange(1 << 15, dtype=float), np.arange(3)
    writes = [Write(i, "assign", b"", pack(each)[0]) for i, each in enumerate((large, small, large + 1))]
    body = pack_writes(writes)
    assert len(body.stream) < 2000
    for found, expected in zip(unpack_writes(body), (large, small, large + 1), strict=True):
        np.testing.assert_array_equal(unpack(found.value), expected)


def test_writes_know_the_methods_of_variables(server):
    for method in ("assign", "assign_add", "assign_sub"):
        server.prepares(1, (method, [1.0, 1.0]))
        server.gets("commit", 1)
    assert server.value == [1, 1]
