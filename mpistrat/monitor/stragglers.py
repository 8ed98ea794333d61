"""Ranks that are slower than the others, in steps for which all ranks wait for the slowest."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from mpistrat.record import flight_record, read
from mpistrat.runtime.topology import Topology

_FEWEST_STEPS = 20
_MARGIN = 1.1  # times the median of the others
_DEVIATIONS = 5  # median absolute deviations of the others over time

# Of each step: seconds in all, in collectives, in input, in saving.
Steps = Sequence[tuple[float, float, float, float]]


@dataclass(frozen=True)
class RankStatistics:
    """How long the steps of one rank took, of the last 200. All times are in seconds.

    Attributes
    ----------
    rank : int
    host : str
    steps : int
        The number of steps that were measured.
    step : float
        Median of a step.
    outside : float
        Median of the time of a step outside collectives.
    deviation : float
        Median absolute deviation of that time.
    input, saving, compute : float
        Mean time of a step in reading input, in writing checkpoints, and in the rest outside collectives.
    slow : bool
        Whether the other ranks wait for this one.
    cost : float
        Share of every step that the job would save if this rank were like the others: 0.13 for 13 %. 0 if not slow.

    Examples
    --------
    >>> import mpistrat
    >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
    >>> strategy.experimental_statistics()[0].rank
    0
    """

    rank: int
    host: str
    steps: int
    step: float
    outside: float
    deviation: float
    input: float
    saving: float
    compute: float
    slow: bool = False
    cost: float = 0.0

    def __str__(self) -> str:
        """Return a sentence for a log."""
        shares = {"input": self.input, "compute": self.compute, "saving": self.saving}
        total = sum(shares.values()) or 1.0
        spent = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in shares.items() if seconds)
        slow = f" is slower than the others, which costs {self.cost:.0%} of every step" if self.slow else ""
        return f"rank {self.rank} ({self.host}){slow}: {self.outside:.3g} s of a step outside collectives ({spent})"


class RankSteps(NamedTuple):
    """The steps of one rank."""

    rank: int
    host: str
    steps: Steps


def step() -> None:
    """Note that a step of the program has ended, where that is neither one ``apply_gradients`` nor one ``run``.

    Examples
    --------
    >>> import mpistrat
    >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
    >>> for _ in range(3):
    ...     for part in range(2):
    ...         _ = strategy.run(lambda: None)
    ...     mpistrat.experimental.step()
    """
    flight_record.step(flight_record.EXPLICIT)


def of_all(topology: Topology) -> tuple[RankStatistics, ...]:
    """Return the statistics of all ranks, which the flight record of each knows. Collective."""
    record = flight_record.current()
    seen = None if record is None else read.parse(record.contents())
    own = RankSteps(topology.rank, socket.gethostname(), () if seen is None else seen.steps)
    return compare(topology.all_gather_object(own))


def compare(ranks: Sequence[RankSteps]) -> tuple[RankStatistics, ...]:
    """Return the statistics of ranks. Those with too few steps are never slow.

    A rank is slow if the median of its time outside collectives exceeds the median of the others by more than 10 %,
    and by more than five times their median absolute deviation over time.
    """
    plain = [_of_one(measured) for measured in ranks]
    return tuple(_judged(own, [other for other in plain if other is not own]) for own in plain)


def _of_one(measured: RankSteps) -> RankStatistics:
    steps = np.array(measured.steps, float).reshape(-1, 4)
    if not len(steps):
        return RankStatistics(measured.rank, measured.host, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    totals, collectives, input, saving = steps.T
    outside = totals - collectives  # in a collective the fast ranks wait for the slow ones
    middle = np.median(outside)
    in_input, in_saving = float(np.mean(input)), float(np.mean(saving))
    return RankStatistics(
        measured.rank,
        measured.host,
        len(steps),
        float(np.median(totals)),
        float(middle),
        float(np.median(abs(outside - middle))),
        in_input,
        in_saving,
        max(0.0, float(np.mean(outside)) - in_input - in_saving),
    )


def _judged(own: RankStatistics, others: Sequence[RankStatistics]) -> RankStatistics:
    others = [other for other in others if other.steps >= _FEWEST_STEPS]
    if own.steps < _FEWEST_STEPS or not others:
        return own
    usual = float(np.median([other.outside for other in others]))
    deviation = float(np.median([other.deviation for other in others]))
    if own.outside <= _MARGIN * usual or own.outside - usual <= _DEVIATIONS * deviation:
        return own
    cost = min(1.0, (own.outside - usual) / own.step) if own.step else 0.0
    return replace(own, slow=True, cost=cost)
