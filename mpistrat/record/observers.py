"""What is told when the flight record of this process begins: parts of the package above the record register here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_functions: list[Callable[[Any], object]] = []


def when_started(function: Callable[[Any], object]) -> None:
    """Call a function with the `FlightRecord` of this process when it is made, if there are several ranks."""
    _functions.append(function)


def tell(record: Any) -> None:
    """Tell of a record. Further calls do nothing."""
    while _functions:
        _functions.pop()(record)
