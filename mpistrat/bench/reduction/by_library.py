"""The all-reduce of the library, as all measurements of it call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpistrat
from mpistrat.experimental import CommunicationOptions


def all_reduces(
    strategy: Any, value: Any, totals: list[Any], name: str | None = None
) -> Callable[[int], object]:
    """Return ``times(k)``, which sums a value k times over the ranks, and keeps the last sum in ``totals[0]``.

    ``name`` is the algorithm; by default the library chooses it.
    """
    options = None if name is None else CommunicationOptions(implementation=name)

    def times(k: int) -> None:
        replica = mpistrat.get_replica_context()
        assert replica is not None
        for _ in range(k):
            total = replica.all_reduce("SUM", value, options)
        totals[:] = [total]

    return lambda k: strategy.run(times, (k,))
