"""Measured costs, between the sizes at which `mpistrat bench tune` measured them."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

Points = Mapping[str, Sequence[tuple[int, float]]]  # name of an algorithm -> bytes and seconds, ascending


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
