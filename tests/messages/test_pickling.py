"""Objects as bytes, and functions by their digest."""

import threading

import numpy as np
import pytest

import mpistrat
from mpistrat.messages.mailbox import FunctionKeeper, FunctionSender, ReceivedMessage
from mpistrat.messages.pickling import failure_of, is_plain, pack, unpack


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("n", [0, 3, 100_000])
def test_arrays_arrive_writable_and_equal(n, copy):
    value = {"a": [np.arange(n, dtype=np.float32), np.arange(2 * n).reshape(2, n).T], "b": (1, "x", None)}
    packed, references = pack(value, copy=copy)
    back = unpack(packed)
    assert references == []
    np.testing.assert_array_equal(back["a"][0], value["a"][0])
    np.testing.assert_array_equal(back["a"][1], value["a"][1])
    assert back["b"] == value["b"]
    assert len(packed.stream) < 5 * (1 << 16) or n < 1000


def test_a_copy_keeps_the_value_of_its_time():
    array = np.zeros(100_000)
    packed, _ = pack(array, copy=True)
    array += 1
    assert unpack(packed).max() == 0


def test_what_needs_no_cloudpickle():
    assert is_plain([1, {"a": (np.float32(1), np.ones(3))}])
    assert not is_plain([object()])
    assert not is_plain(np.array([object()]))


class SentMessages:
    """Keeps the messages that are sent."""

    def __init__(self):
        self.sent = []

    def send(self, to, kind, head, body):
        self.sent.append((to, ReceivedMessage(7, kind, head, body)))


def test_a_function_is_sent_once_to_each_rank():
    mailbox, keeper = SentMessages(), FunctionKeeper()
    sender = FunctionSender(mailbox)
    scale = 3

    def times(x):
        return x * scale

    for to in (1, 2, 1, 1):
        sender.send(to, sender.packed(times))
    assert [to for to, _ in mailbox.sent] == [1, 2]
    keeper.keep(mailbox.sent[0][1])
    assert keeper.function(7, sender.packed(times).digest)(2) == 6


def test_functions_that_are_not_used_are_forgotten():
    mailbox, keeper = SentMessages(), FunctionKeeper()
    sender = FunctionSender(mailbox)
    functions = [lambda i=i: i for i in range(300)]
    for function in functions:
        sender.send(1, sender.packed(function))
        keeper.keep(mailbox.sent[-1][1])
    digests = [sender.packed(function).digest for function in functions]
    assert keeper.function(7, digests[-1])() == 299
    with pytest.raises(KeyError):
        keeper.function(7, digests[0])
    sender.send(1, sender.packed(functions[0]))  # is sent again
    keeper.keep(mailbox.sent[-1][1])
    assert keeper.function(7, digests[0])() == 0


def test_what_cannot_be_sent_is_named():
    guard = threading.Lock()
    with pytest.raises(TypeError, match="because of 'guard', a lock"):
        FunctionSender(SentMessages()).packed(lambda: guard.locked())


def test_plain_variables_are_not_sent():
    v = mpistrat.Variable([1.0])
    with pytest.raises(TypeError, match="because of 'v', a LocalVariable"):
        FunctionSender(SentMessages()).packed(lambda: v.read_value())


class TwoArguments(ValueError):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


@pytest.mark.parametrize(
    ("error", "kind"), [(KeyError("k"), KeyError), (TwoArguments(1, 2), RuntimeError), (SystemExit(3), RuntimeError)]
)
def test_errors_keep_their_class_where_they_can(error, kind):
    try:
        raise error
    except BaseException as caught:
        back = failure_of(caught, "rank 2 (worker 1)").error()
    assert type(back) is kind
    assert "rank 2 (worker 1)" in str(back.__cause__)
    assert "test_pickling.py" in str(back.__cause__)
