"""The caller makes elements itself while a thread would win nothing: by what they cost, and what it does in between."""

import threading

import pytest

from mpistrat.data.pipeline import prefetch
from mpistrat.data.pipeline.prefetch import Prefetched

LITTLE, MUCH = 1e-5, 1.0  # seconds


class Clock:
    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


@pytest.mark.parametrize(
    ("costs", "between", "in_line"),
    [
        ([LITTLE] * 20, MUCH, 20),
        ([MUCH] * 20, LITTLE, 20),
        ([MUCH] * 20, MUCH, 2),
        ([MUCH, *[LITTLE] * 9, MUCH, *[LITTLE] * 9], MUCH, 20),
        ([MUCH, LITTLE] * 10, MUCH, 5),  # the third shows that it happens often
        ([*[LITTLE] * 15, MUCH] * 5, MUCH, 48),
        ([*[LITTLE] * 5, *[MUCH] * 15], MUCH, 7),
    ],
)
def test_by_their_cost(monkeypatch, costs, between, in_line):
    clock, names = Clock(), []
    monkeypatch.setattr(prefetch, "time", clock)

    def elements():
        for i, cost in enumerate(costs):
            names.append(threading.current_thread().name)
            clock.now += cost
            yield i

    ahead = Prefetched(elements(), 2, in_line=True)
    for i in range(len(costs)):
        assert next(ahead) == i
        clock.now += between
    assert names == ["MainThread"] * in_line + ["mpistrat-read"] * (len(costs) - in_line)
    assert ahead.in_line == (in_line == len(costs))
    ahead.close()
