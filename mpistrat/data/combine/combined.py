"""The base of sources that are made of other datasets, whose rows can be read in any order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.data.combine.dataset_part import DatasetPart, ready_parts, seeds_of_parts, with_seeds_of_parts
from mpistrat.data.rows import elements, spec
from mpistrat.data.rows.contracts import IN_MEMORY_AT_ONCE, Peers, Seed, Source


class CombinedSource(Source):
    """The rows of some datasets, combined.

    A subclass says how: `length`, `numbers`, `each`, `element_spec` and `of_parts`.
    """

    word: str

    def __init__(self, parts: Sequence[DatasetPart]):
        self.parts = parts

    def of_parts(self, parts: Sequence[DatasetPart]) -> CombinedSource:
        """Return the same combination of other parts."""
        return type(self)(parts)

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError(f"{self} is endless")
        return self.length

    def read(self, rows: np.ndarray) -> Any:
        """Return these rows, stacked on axis 0."""
        if not len(rows):
            return spec.zeros(self.element_spec(), 0)
        return elements.stack(self.each(rows))

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

    def fingerprint(self) -> Any:
        """Return the kind of combination, and the fingerprints of its parts."""
        return f"{self.word}({'; '.join(part.fingerprint() for part in self.parts)})"

    def identity(self) -> dict[str, Any]:
        """Return the kind of combination, and the identities of its parts."""
        found = {"source": self.word, "parts": [part.identity() for part in self.parts]}
        blocks = self.blocks()
        return found if blocks is None else {**found, "blocks": [int(blocks.rows), int(blocks.window)]}

    def agree(self, peers: Peers) -> None:
        """Let every part agree with the peers. Collective."""
        for part in self.parts:
            part.source.agree(peers)

    def seeds(self) -> list[Seed]:
        """Return the seeds of the parts."""
        return seeds_of_parts(self.parts)

    def with_seeds(self, seeds: Sequence[int]) -> CombinedSource:
        """Return the source with other seeds for the shuffles of its parts."""
        return self.of_parts(with_seeds_of_parts(self.parts, seeds))

    def ready(self, memory: int, ranks: int | None = None, peers: Peers | None = None) -> CombinedSource:
        """Return the source with parts that are ready for their shuffles."""
        parts = ready_parts(self.parts, memory, ranks, peers)
        return self if parts is None else self.of_parts(parts)  # the rows that a source keeps stay with it

    def __repr__(self) -> str:
        return f"{self.word}({'; '.join(map(repr, self.parts))})"
