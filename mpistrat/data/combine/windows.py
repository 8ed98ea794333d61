"""Source of windows over the rows of a dataset."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpistrat import nest
from mpistrat.data.combine.combined import CombinedSource, DatasetPart
from mpistrat.data.combine.streamed import Combine
from mpistrat.data.rows import elements, spec
from mpistrat.data.rows.blocks import Blocks
from mpistrat.data.rows.contracts import Source
from mpistrat.runtime.topology import Topology

if TYPE_CHECKING:
    from typing_extensions import Self


class Windows(NamedTuple):
    """Windows of ``size`` rows, ``stride`` apart from each other. The next one begins ``shift`` rows later."""

    size: int
    shift: int
    stride: int
    drop_remainder: bool
    across_files: bool

    def number(self, rows: np.ndarray) -> np.ndarray:
        """Return how many windows begin in runs of ``rows`` rows."""
        longest = (self.size - 1) * self.stride if self.drop_remainder else 0
        return np.maximum(0, -(-(rows - longest) // self.shift))

    def of_stream(self) -> Combine:
        """Return the combination that makes windows of the rows of a stream."""
        return lambda openers, _: self._streamed(openers[0]())

    def _streamed(self, rows: Iterator[Any]) -> Iterator[Any]:
        held: deque[Any] = deque()
        span = (self.size - 1) * self.stride + 1
        while True:
            held.extend(itertools.islice(rows, span - len(held)))
            window = [*itertools.islice(held, 0, span, self.stride)]
            if not window or (len(window) < self.size and self.drop_remainder):
                return
            yield elements.stack(window)
            for _ in range(min(self.shift, len(held))):
                held.popleft()
            # Drops the rows between two windows, if ``shift`` is larger than a window.
            deque(itertools.islice(rows, max(0, self.shift - span)), maxlen=0)


class WindowedSource(CombinedSource):
    """Windows of the rows of one part. A window has the number of its first row, its rows, and the iteration."""

    name = "window"

    def __init__(self, parts: Sequence[DatasetPart], windows: Windows, firsts: np.ndarray | None = None):
        super().__init__(parts)
        (self._part,) = parts
        self._windows, self._firsts = windows, firsts

    def of_parts(self, parts: Sequence[DatasetPart]) -> Self:
        return type(self)(parts, self._windows, self._firsts)

    @property
    def length(self) -> int | None:
        if self._windows.across_files:
            rows = self._part.length
            return None if rows is None else int(self._windows.number(np.array(rows)))
        return int(self._runs[1][-1])

    @cached_property
    def _runs(self) -> tuple[np.ndarray, np.ndarray]:
        """The first row and the first window of each run of rows that no window leaves, and their ends."""
        if self._windows.across_files:
            # One run; an endless one has no end that a window could reach.
            rows = np.array([0, np.iinfo(np.int64).max if self._part.length is None else self._part.length])
        elif (blocks := self._part.blocks()) is not None:
            rows = blocks.starts
        else:
            raise ValueError(
                f"window(across_files=False) needs rows of files in their order, not {self._part}: call it directly "
                "after from_hdf5() and the like, or after map()"
            )
        return rows, np.append(0, self._windows.number(np.diff(rows)).cumsum())

    def numbers(self, ks: np.ndarray, iteration: int) -> np.ndarray:
        rows, begins = self._runs
        run = begins.searchsorted(ks, side="right") - 1
        first = rows[run] + (ks - begins[run]) * self._windows.shift
        # Windows at the end of a run may have fewer rows.
        rows_left = -(-(rows[run + 1] - first) // self._windows.stride)
        return np.stack([first, np.minimum(rows_left, self._windows.size), np.full(len(ks), iteration)], axis=1)

    def element_spec(self) -> Any:
        return spec.stacked(
            self._part.plan.element_spec(), self._windows.size if self._windows.drop_remainder else None
        )

    def read(self, rows: np.ndarray) -> Any:
        if self._has_short:
            raise ValueError(
                f"the last windows have fewer than {self._windows.size} rows, so they cannot be stacked: give "
                "window(drop_remainder=True), or take padded_batch()"
            )
        return nest.map_structure(lambda x: x.reshape(len(rows), -1, *x.shape[1:]), self._rows(rows))

    def read_list(self, rows: np.ndarray) -> list[Any]:
        leaves, rebuild = nest.flatten(self._rows(rows))
        ends = rows[:, 1].cumsum()
        return [rebuild([leaf[a:b].copy() for leaf in leaves]) for a, b in zip(ends - rows[:, 1], ends, strict=True)]

    def _rows(self, windows: np.ndarray) -> Any:
        """Return the rows of some windows, one window after another. A row of several windows is read once."""
        first, counts, iterations = windows.T
        ends = counts.cumsum()
        offsets = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        ks = np.repeat(first, counts) + offsets * self._windows.stride
        iteration_of = np.repeat(iterations, counts)
        numbers = np.empty((len(ks), self._part.numbers_of_row), np.int64)
        for iteration in np.unique(iteration_of).tolist():
            selected = iteration_of == iteration
            numbers[selected] = self._part.numbers(ks[selected], iteration)
        # Windows that overlap have common rows.
        wanted, inverse = np.unique(numbers, axis=0, return_inverse=True)
        tree = self._part.plan.read_rows(self._part.of_numbers(wanted))
        # NumPy 2.0 alone returns an inverse with two axes.
        return nest.map_structure(lambda x: x[inverse.reshape(-1)], tree)

    @cached_property
    def _has_short(self) -> bool:
        length = self.length
        return length is not None and length != int(
            self._windows._replace(drop_remainder=True).number(np.diff(self._runs[0])).sum()
        )

    # --- files ----------------------------------------------------------------------------

    def blocks(self) -> Blocks | None:
        """Return the blocks of the rows in which windows begin."""
        blocks = self._part.blocks()
        if blocks is None or self.length is None:
            return None
        rows = max(1, blocks.rows // self._windows.shift)
        if not self._windows.across_files:
            return blocks._replace(rows=rows, starts=self._runs[1])
        starts = np.minimum(-(-blocks.starts // self._windows.shift), self.length)
        return blocks._replace(rows=rows, starts=np.append(starts[:-1], self.length))

    def file_rows(self) -> Sequence[int]:
        blocks = self.blocks() if self._part.source.file_rows() else None
        return () if blocks is None else np.diff(blocks.starts).tolist()

    def of_files(self, which: Sequence[int]) -> Source:
        if self._windows.across_files:
            raise ValueError("windows lie across files: give window(across_files=False), or AutoShardPolicy.AUTO")
        part = replace(self._part, source=self._part.source.of_files(which))
        return type(self)([part], self._windows, self._runs[1][np.asarray(which)])

    def numbers_of_all(self, ks: np.ndarray) -> np.ndarray:
        if self._firsts is None:
            return ks
        run = self._runs[1].searchsorted(ks, side="right") - 1
        return self._firsts[run] + ks - self._runs[1][run]

    def by_file(self) -> Source:
        return self.of_parts([replace(self._part, source=self._part.source.by_file())])

    def side_by_side(self) -> int:
        return self._part.source.side_by_side()

    def for_shuffle(
        self, nbytes: int, wanted: int | None, sharing: int | None = None, ranks: Topology | None = None
    ) -> Source:
        """Return the source whose files are ready for a shuffle."""
        if self._part.blocks() is None:
            return self
        source = self._part.source.for_shuffle(nbytes, None, sharing, ranks)
        return self.of_parts([replace(self._part, source=source)])

    def fingerprint(self) -> Any:
        return f"{super().fingerprint()} {self._windows}"

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "windows": [*self._windows]}
