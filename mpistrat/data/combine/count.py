"""Source of the integers from a number on."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from mpistrat.data.sources.arrays import RangeSource


class CountSource(RangeSource):
    """The integers from ``start`` on, without end."""

    length = None

    def __init__(self, start: int):
        super().__init__(range(start, sys.maxsize))
        self._start = start

    def __len__(self) -> NoReturn:
        raise TypeError(f"{self} is endless")

    def fingerprint(self) -> Any:
        """Return the range as text."""
        return repr(self)

    def identity(self) -> dict[str, Any]:
        """Return the range as text."""
        return {"source": repr(self)}

    def __repr__(self) -> str:
        return f"the integers from {self._start}"
