"""Source of the integers from a number on."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from mpistrat.data.rows.contracts import IN_MEMORY_AT_ONCE, Source
from mpistrat.data.rows.spec import ArraySpec


class CountSource(Source):
    """The integers from ``start`` on, without end."""

    length = None

    def __init__(self, start: int):
        self._start = start

    def __len__(self) -> NoReturn:
        raise TypeError(f"{self} is endless")

    def element_spec(self) -> ArraySpec:
        """Return the spec of one integer."""
        return ArraySpec((), np.int64)

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Return these integers."""
        return self._start + rows

    @property
    def in_memory(self) -> bool:
        """True."""
        return True

    def at_once(self, share: float) -> int:
        """Return the number of integers in 512 KiB."""
        return IN_MEMORY_AT_ONCE // 8

    def fingerprint(self) -> Any:
        """Return the range as text."""
        return repr(self)

    def identity(self) -> dict[str, Any]:
        """Return the range as text."""
        return {"source": repr(self)}

    def __repr__(self) -> str:
        return f"the integers from {self._start}"
