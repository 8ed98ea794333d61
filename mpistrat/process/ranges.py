"""Numbers of cores and ranks as text."""

from __future__ import annotations

from collections.abc import Iterable


def ranges(numbers: Iterable[int], between: str = ",") -> str:
    """Return cores, or other numbers, as text.

    >>> ranges({0, 1, 2, 5})
    '0-2,5'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return between.join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
