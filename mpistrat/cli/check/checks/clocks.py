"""The check of the clocks of the nodes against the clock of rank 0.

The difference is measured by the fastest of several round trips (F. Cristian, "Probabilistic clock synchronization",
Distributed Computing 3, 1989).
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import Any

from mpistrat.cli.check.checks.finding import CheckedJob, CheckOptions, Finding, Severity
from mpistrat.cli.check.checks.talk import Talk

# The clock of this rank. Tests replace it, because a program cannot set the clock of the machine.
now: Callable[[], float] = time.time

_TRIPS = 8
_ALL_RANKS = 64  # with more ranks, only the first rank of each node is asked
_LOOK, _FIX = 0.1, 1.0


def talk(talk: Talk, options: CheckOptions) -> list[list[float]] | None:
    """Return for each rank that was asked: rank, seconds that its clock is ahead, and their error."""
    peers = range(talk.size) if talk.size <= _ALL_RANKS else talk.leaders
    if talk.rank != 0:
        if talk.rank in peers:
            for _ in range(_TRIPS):
                talk.receive(0, 1)
                talk.send(struct.pack("d", now()), 0)
        return None
    found = []
    for peer in peers:
        if peer == 0:
            continue
        best = (float("inf"), 0.0)
        for _ in range(_TRIPS):
            start = now()
            talk.send(b"?", peer)
            (theirs,) = struct.unpack("d", talk.receive(peer, 8))
            end = now()
            best = min(best, (end - start, theirs - (start + end) / 2))
        found.append([peer, best[1], best[0] / 2])
    return found


def judge(job: CheckedJob) -> Finding:
    found: Any = job.talked.get("clocks")
    if found is None:
        return Finding("the ranks could not be asked", Severity.UNKNOWN)
    if not found:
        return Finding("one rank", Severity.OK)
    rank, ahead, error = max(found, key=lambda each: abs(each[1]) - each[2])
    rank = int(rank)
    least = max(0.0, abs(ahead) - error)
    if least < _LOOK:
        return Finding(f"within {max(abs(each[1]) + each[2] for each in found) * 1e3:.1f} ms", Severity.OK)
    return Finding(
        f"rank {rank} ({job.facts[rank]['host']}) is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} rank 0",
        Severity.FIX if least >= _FIX else Severity.LOOK,
        "tell your administrators (chronyd or ntpd on that node): file times and time limits will be wrong",
    )
