"""The base of sources that are made of other datasets, whose rows can be read in any order."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.data.combine.of_parts import OfParts
from mpistrat.data.rows import elements, spec
from mpistrat.data.rows.contracts import IN_MEMORY_AT_ONCE, Source


class CombinedSource(OfParts, Source):
    """The rows of some datasets, combined.

    A subclass says how: `length`, `numbers`, `each`, `element_spec` and `of_parts`.
    """

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError(f"{self} is endless")
        return self.length

    def read(self, rows: np.ndarray) -> Any:
        """Return these rows, stacked on axis 0."""
        if not len(rows):
            return spec.zeros(self.element_spec(), 0)
        return elements.stack(self.each(rows), elements.dtypes_of(self.element_spec()))

    @property
    def in_memory(self) -> bool:
        """Whether the rows of all parts lie in memory."""
        return all(part.in_memory for part in self.parts)

    def at_once(self, share: float) -> int:
        """Return the number of rows in 512 KiB if they lie in memory."""
        return IN_MEMORY_AT_ONCE // max(1, spec.row_bytes(self.element_spec())) if self.in_memory else 1

    def announced(self) -> bool:
        """Return False: parts are not read ahead."""
        return False

    def identity(self) -> dict[str, Any]:
        """Return the kind of combination, and the identities of its parts."""
        found, blocks = super().identity(), self.blocks()
        return found if blocks is None else {**found, "blocks": [int(blocks.rows), int(blocks.window)]}
