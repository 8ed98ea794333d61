"""The costs of the algorithms: measured by `mpistrat bench tune` if the user asks for it, else predicted."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Any

from mpistrat.collectives.algorithms.contract import Algorithm
from mpistrat.runtime.environment import rc
from mpistrat.runtime.slot import Slot
from mpistrat.runtime.topology import Topology


class Measured(Slot):
    """The measured times of a topology, by the name of the algorithm.

    Attributes
    ----------
    points : dict or None
        None before `heed`.
    """

    points: Any = None


def heed(topology: Topology) -> None:
    """Let `choose` use the measured costs if ``rc.tuned`` is true on rank 0. The first call is collective."""
    measured = topology.slot(Measured)
    if measured.points is None:
        found, tuned = None, rc.tuned  # read on every rank, so that all raise
        if topology.rank == 0 and topology.size > 1 and tuned:
            from mpistrat.collectives.algorithms import cost_file

            found = cost_file.read(topology)
        measured.points = topology.broadcast_object(found) or {}


def of(topology: Topology, algorithm: Algorithm, nbytes: int) -> float:
    """Return the seconds that a message takes: measured if the topology has measurements, else predicted."""
    measured = topology.slot(Measured).points
    if not measured:
        return algorithm.cost(topology, nbytes)
    points = measured.get(algorithm.name)
    return seconds(points, nbytes) if points else math.inf


def seconds(points: Sequence[tuple[int, float]], nbytes: int) -> float:
    """Return the seconds for ``nbytes`` bytes, interpolated between two points, proportional beyond the last.

    Examples
    --------
    >>> measured = [(1000, 1e-5), (2000, 2e-5)]
    >>> [round(1e6 * seconds(measured, nbytes)) for nbytes in (10, 1500, 4000)]
    [10, 15, 40]
    """
    i = bisect.bisect_left(points, (nbytes, 0.0))
    if i == 0:
        return points[0][1]
    if i == len(points):
        return points[-1][1] * nbytes / points[-1][0]
    (low, first), (high, last) = points[i - 1], points[i]
    return first + (last - first) * (nbytes - low) / (high - low)
