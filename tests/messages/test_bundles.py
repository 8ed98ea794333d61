"""Several requests to one rank are one letter, and each request has its own outcome."""

import numpy as np
import pytest

from mpistrat.messages.pickling import EMPTY, Packed, failure_of, pack, unpack
from mpistrat.messages.post import SEVERAL, Letter, ask_in_bundles, outcomes_of


class Wire:
    """Stands in for a Post: carries bytes to ranks that answer at once, and counts the letters."""

    def __init__(self, answers):
        self._answers, self.letters = answers, []

    def ask_all(self, requests):
        values = []
        for number, (to, kind, head, body) in enumerate(requests):
            self.letters.append((to, kind))
            sent = Packed(bytes(body.stream), tuple(bytearray(each) for each in body.buffers))
            letter = Letter(to, kind, (number, *head), sent)
            if kind == SEVERAL:
                self.reply(letter, outcomes_of(letter, self._outcome))
                values.append(unpack(self._reply))
            else:
                values.append(self._answers(letter))
        return values

    def reply(self, letter, body):
        self._reply = Packed(bytes(body.stream), tuple(bytearray(each) for each in body.buffers))

    def _outcome(self, letter):
        try:
            return pack(self._answers(letter))[0]
        except LookupError as error:
            return pack(failure_of(error, f"rank {letter.source}"))[0]


def echo(letter):
    if letter.kind == "fail":
        raise LookupError(letter.head[1])
    value = unpack(letter.body) if letter.body is not EMPTY and len(letter.body.stream) else None
    return letter.source, letter.kind, letter.head[1:], value


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
    assert len(bundled.letters) == len({*ranks})


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
    assert [to for to, _ in wire.letters] == [1, 2]
