"""Source of the rows of some datasets, one dataset after another."""

from __future__ import annotations

import numpy as np

from mpistrat.data.combine.chosen import ChosenSource
from mpistrat.data.rows.blocks import Blocks


class ConcatenatedSource(ChosenSource):
    """All rows of the first part, then those of the next. An endless part is the last."""

    word = "concatenate"

    @property
    def length(self) -> int | None:
        """Number of rows of all parts."""
        lengths = [part.length for part in self.parts]
        finite = [each for each in lengths if each is not None]
        return sum(finite) if len(finite) == len(lengths) else None

    def chosen(self, ks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of the part of each row, and the number of the row in that part."""
        starts = self._starts()
        which = starts.searchsorted(ks, side="right") - 1
        return which, ks - starts[which]

    def blocks(self) -> Blocks | None:
        """Return the blocks of the largest part, in all parts."""
        found = [part.blocks() for part in self.parts]
        known = [each for each in found if each is not None]
        if len(known) < len(found) or self.length is None:
            return None
        starts = [start + each.starts[:-1] for start, each in zip(self._starts(), known, strict=True)]
        largest = max(known, key=lambda each: int(each.starts[-1]))
        return largest._replace(starts=np.concatenate([*starts, [self.length]]))

    def _starts(self) -> np.ndarray:
        starts = [0]
        for part in self.parts[:-1]:
            if part.length is None:
                break
            starts.append(starts[-1] + part.length)
        return np.array(starts, np.int64)
