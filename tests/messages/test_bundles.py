"""Several requests to one rank are one message, and each request has its own outcome."""

import numpy as np
import pytest

from mpistrat.messages.mailbox import SEVERAL, ReceivedMessage, ask_in_bundles, outcomes_of
from mpistrat.messages.pickling import EMPTY, Packed, failure_of, pack, unpack


class Wire:
    """Stands in for a Mailbox: carries bytes to ranks that answer at once, and counts the messages."""

    def __init__(self, answers):
        self._answers, self.messages = answers, []

    def ask_all(self, requests):
        values = []
        for number, (to, kind, head, body) in enumerate(requests):
            self.messages.append((to, kind))
            sent = Packed(bytes(body.stream), tuple(bytearray(each) for each in body.buffers))
            message = ReceivedMessage(to, kind, (number, *head), sent)
            if kind == SEVERAL:
                self.reply(message, outcomes_of(message, self._outcome))
                values.append(unpack(self._reply))
            else:
                values.append(self._answers(message))
        return values

    def reply(self, message, body):
        self._reply = Packed(bytes(body.stream), tuple(bytearray(each) for each in body.buffers))

    def _outcome(self, message):
        try:
            return pack(self._answers(message))[0]
        except LookupError as error:
            return pack(failure_of(error, f"rank {message.source}"))[0]


def echo(message):
    if message.kind == "fail":
        raise LookupError(message.head[1])
    value = unpack(message.body) if message.body is not EMPTY and len(message.body.stream) else None
    return message.source, message.kind, message.head[1:], value


def requests_of(ranks, size):
    return [
        (to, f"kind {i}", (i, "fact"), pack(np.arange(size) + i)[0] if i % 3 else EMPTY) for i, to in enumerate(ranks)
    ]


@pytest.mark.parametrize("size", [0, 10, 100_000])  # the last is beside the pickle
@pytest.mark.parametrize("ranks", [[], [1], [1, 2], [2, 2], [2, 1, 2, 1, 1, 3]])
def test_replies_are_those_of_single_requests_in_their_order(ranks, size):
    bundled, single = Wire(echo), Wire(echo)
    requests = requests_of(ranks, size)
    replies = ask_in_bundles(bundled, requests)
    assert len(replies) == len(requests)
    for reply, expected in zip(replies, single.ask_all(requests), strict=True):
        assert reply[:3] == expected[:3]
        np.testing.assert_array_equal(reply[3], expected[3])
    assert len(bundled.messages) == len({*ranks})


def test_the_first_error_is_raised_after_all_were_asked():
    wire = Wire(echo)
    requests = [
        (1, "a", (), EMPTY),
        (1, "fail", ("first",), EMPTY),
        (2, "a", (), EMPTY),
        (2, "fail", ("second",), EMPTY),
    ]
    with pytest.raises(LookupError, match="first") as raised:
        ask_in_bundles(wire, requests)
    assert "rank 1" in str(raised.value.__cause__)
    assert [to for to, _ in wire.messages] == [1, 2]
