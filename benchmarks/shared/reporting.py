"""The results of a measurement, as a table and as a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

LIBRARY = "mpistrat"
_COUNTED = {"memory": lambda nbytes: f"{nbytes / (1 << 20):.1f} MiB", "opened": lambda count: f"{count:.0f} files"}


class Row(NamedTuple):
    """The median of one measurement, in seconds, with ``n`` ranks.

    ``way`` is the program: ``"mpistrat"`` or the name of a competitor. ``bytes`` are those of one replica's message. In
    case ``"memory"`` they are peak memory and in case ``"opened"`` a number of files; ``seconds`` is 0 in these two.
    """

    subject: str
    case: str
    way: str
    bytes: int
    seconds: float
    n: int

    @property
    def counted(self) -> bool:
        """Whether the row is a number of bytes or files, in ``bytes``."""
        return self.case in _COUNTED


class Report:
    """The rows of one subject, measured with ``n`` ranks."""

    def __init__(self, subject: str, n: int):
        self.subject = subject
        self.n = n
        self.rows: list[Row] = []

    def add(self, case: str, way: str, nbytes: int, seconds: float) -> None:
        """Add one median."""
        self.rows.append(Row(self.subject, case, way, nbytes, seconds, self.n))

    def add_medians(self, case: str, nbytes: int, seconds: Mapping[str, list[float]]) -> None:
        """Add the median of each way."""
        for way, samples in seconds.items():
            self.add(case, way, nbytes, median(samples))

    def table(self) -> str:
        """Return an aligned table that compares the library with each competitor.

        Rows of the same case and size are grouped.
        """
        first: dict[tuple[str, int], int] = {}
        for number, row in enumerate(self.rows):
            first.setdefault(_group(row), number)
        cells = [("case", "bytes", "way", "median", f"{LIBRARY} takes")]
        cells += [self._cells(row) for row in sorted(self.rows, key=lambda row: first[_group(row)])]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        return "\n".join([f"{self.subject}, {self.n} rank{'s' * (self.n > 1)}", *lines])

    def _cells(self, row: Row) -> tuple[str, str, str, str, str]:
        nbytes = "" if row.counted else str(row.bytes)
        return row.case, nbytes, row.way, _words(row, _value(row)), self._compared(row)

    def _compared(self, row: Row) -> str:
        ours = [r for r in self.rows if r.way == LIBRARY and _group(r) == _group(row)]
        if row.way == LIBRARY or not ours or not _value(row) or row.case == "opened":
            return ""
        mine, its = _value(ours[0]), _value(row)
        return f"{mine / its:.2f} x, {'+' if mine >= its else '-'}{_words(row, abs(mine - its))}"

    def show(self, json_file: str | None, *more: str) -> None:
        """Print the table and more lines. Write the rows to ``json_file`` as a JSON list of objects."""
        print("\n".join([self.table(), *more]))
        if json_file:
            Path(json_file).write_text(json.dumps([row._asdict() for row in self.rows], indent=1) + "\n")


def any_fault(comm: Any, faults: Sequence[str]) -> bool:
    """Return whether any rank has faults. Rank 0 prints those of all ranks. Collective."""
    told = comm.allgather(list(faults))
    lines = [f"rank {rank}: {fault}" for rank, each in enumerate(told) for fault in each]
    if lines and comm.rank == 0:
        print("\n".join(lines), file=sys.stderr)
    return bool(lines)


def repeated(call: Callable[[], Any]) -> Callable[[int], Any]:
    """Return ``times(k)``, which calls a function k times and returns its last result."""

    def times(k: int) -> Any:
        result = None
        for _ in range(k):
            result = call()
        return result

    return times


def _group(row: Row) -> tuple[str, int]:
    return row.case, 0 if row.counted else row.bytes


def _value(row: Row) -> float:
    return row.bytes if row.counted else row.seconds


def _words(row: Row, value: float) -> str:
    if row.counted:
        return _COUNTED[row.case](value)
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if round(value * factor, 2) >= 1:
            return f"{value * factor:.2f} {unit}"
    return f"{value * 1e6:.2f} us"
