"""Read-ahead: telling a source which rows a shuffle needs next."""

from __future__ import annotations

from mpistrat.data.pipeline.transforms import BlocksShuffled
from mpistrat.data.rows.contracts import Source


class Advice:
    """Announcements of the rows of the current window and of the next one, each window once.

    They may be wrong when two iterations of a dataset alternate. That costs time but does not change a result.
    """

    def __init__(self, source: Source, windows: BlocksShuffled):
        self._source, self._windows = source, windows
        self._said = (-1, 0, 0)

    def reached(self, iteration: int, k: int) -> None:
        """Announce the rows that follow element ``k`` of an iteration of the shuffle."""
        of, stop, announced = self._said
        if of == iteration and k < stop:
            return
        if of == iteration and k < announced:
            stop = announced
        else:
            stop, spans = self._windows.spans(k, iteration)
            self._source.advise(spans)
        announced = stop
        if stop < self._windows.length:
            announced, spans = self._windows.spans(stop, iteration)
            self._source.advise(spans)
        self._said = (iteration, stop, announced)
