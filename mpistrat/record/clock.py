"""The clocks of the ranks: which ranks share one, and what one is ahead of another."""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_ROUNDS = 12  # the fastest of these counts


class Sample(NamedTuple):
    """What the clock of the first rank was ahead of this rank's, at one time."""

    at: float  # by the monotonic clock of this rank
    # the difference in seconds, and how far it may be off
    ahead: float
    error: float
    reference: int  # the number of the first rank's clock


def number() -> int:
    """Return a number that is equal for processes with the same monotonic clock: those of one boot of one machine."""
    facts = []
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        facts.append(file.read())
    with contextlib.suppress(OSError):
        facts.append(os.readlink("/proc/self/ns/time"))  # containers may have a clock of their own
    text = "|".join(facts or [os.uname().nodename]).encode()
    return zlib.crc32(text) << 31 | zlib.adler32(text) >> 1


def measure(world: Any, clocks: Sequence[int]) -> Sample:
    """Return what the clock of rank 0 is ahead of this rank's. Collective, if there are several clocks.

    ``clocks`` has the number of each rank's clock. Rank 0 exchanges messages with one rank of each other clock. The
    fastest answer of several counts: the error is at most half of the time that it took.
    """
    first = clocks[0]
    others = list(dict.fromkeys(each for each in clocks if each != first))
    now = time.monotonic
    if not others:
        return Sample(now(), 0.0, 0.0, first)
    told = np.zeros((len(others), 2))
    answer = np.zeros(1)
    for i, clock in enumerate(others):
        rank = clocks.index(clock)
        if world.rank == 0:
            told[i] = 0.0, np.inf
            for _ in range(_ROUNDS):
                sent = now()
                world.Send(answer, rank)
                world.Recv(answer, rank)
                took = now() - sent
                if took / 2 < told[i, 1]:
                    told[i] = sent + took / 2 - answer[0], took / 2
        elif world.rank == rank:
            for _ in range(_ROUNDS):
                world.Recv(answer, 0)
                answer[0] = now()
                world.Send(answer, 0)
    world.Bcast(told)
    own = clocks[world.rank]
    ahead, error = (0.0, 0.0) if own == first else told[others.index(own)].tolist()
    return Sample(now(), ahead, error, first)
