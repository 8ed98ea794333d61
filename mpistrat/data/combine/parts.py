"""The parts of a source that is made of other datasets, and what all such sources have in common."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.data.pipeline.definition import Definition
from mpistrat.data.pipeline.transforms import Shuffle, length_of
from mpistrat.data.rows import elements, spec
from mpistrat.data.rows.blocks import Blocks
from mpistrat.data.rows.contracts import IN_MEMORY_AT_ONCE, Seed, Source
from mpistrat.runtime.topology import Topology

if TYPE_CHECKING:
    from typing_extensions import Self


class DatasetPart(Definition):
    """A source with its transforms, of single rows."""

    @property
    def endless(self) -> bool:
        """Whether its rows have no end. Looks into no file."""
        from mpistrat.data.sources.files import FileSource  # a late import: loads h5py

        if self.streamed:
            return False
        parts = getattr(self.source, "parts", ())
        known = isinstance(self.source, FileSource) or (parts and not any(part.endless for part in parts))
        return length_of(1 if known else self.source.length, self.transforms) is None

    @cached_property
    def _no_numbers(self) -> np.ndarray:
        return self.plan.locate(np.empty(0, np.int64), 0)

    @property
    def numbers_of_row(self) -> int:
        """How many numbers a row has."""
        return 1 if self._no_numbers.ndim == 1 else self._no_numbers.shape[1]

    def numbers(self, ks: np.ndarray, iteration: int) -> np.ndarray:
        """Return the numbers of rows as an array of two axes."""
        found: np.ndarray = self.plan.locate(ks, iteration)
        return found.reshape(len(ks), -1) if len(ks) else found.reshape(0, self.numbers_of_row)

    def of_numbers(self, numbers: np.ndarray) -> np.ndarray:
        """Return columns of `numbers`, as the plan needs them."""
        return numbers[:, 0] if self._no_numbers.ndim == 1 else numbers

    @property
    def in_memory(self) -> bool:
        """Whether the rows lie in memory, and no function of the program makes them."""
        return not self.streamed and self.plan.in_memory and not self.plan.maps

    def blocks(self) -> Blocks | None:
        """Return which rows are best read together, where the transforms keep the rows in their places."""
        if self.streamed or any(each.reorders for each in self.transforms):
            return None
        return self.source.blocks()

    def identity(self) -> dict[str, Any]:
        """Return what must be equal to restore a state."""
        described = self.described()
        found = {**described["source"], "pipeline": described["pipeline"]}
        blocks = None if self.streamed else self.source.blocks()
        if blocks is not None and any(isinstance(each, Shuffle) for each in self.transforms):
            found["blocks"] = [int(blocks.rows), int(blocks.window)]
        return found

    def fingerprint(self) -> str:
        """Return what must be equal on all ranks."""
        return ", ".join(map(str, (self.source.fingerprint(), *self.transforms)))

    def __str__(self) -> str:
        return ", ".join(map(str, (self.source, *self.transforms)))


class OfParts:
    """The methods of a source that let its parts do the same. It stands before `Source` or `StreamSource`."""

    word: str

    def __init__(self, parts: Sequence[DatasetPart]):
        self.parts = parts

    def of_parts(self, parts: Sequence[DatasetPart]) -> Self:
        """Return the same combination of other parts."""
        return type(self)(parts)

    def fingerprint(self) -> Any:
        """Return the kind of combination, and the fingerprints of its parts."""
        return f"{self.word}({'; '.join(part.fingerprint() for part in self.parts)})"

    def identity(self) -> dict[str, Any]:
        """Return the kind of combination, and the identities of its parts."""
        return {"source": self.word, "parts": [part.identity() for part in self.parts]}

    def agree(self, ranks: Topology) -> None:
        """Let every part agree with the other ranks. Collective."""
        for part in self.parts:
            part.source.agree(ranks)

    def seeds(self) -> list[Seed]:
        """Return the seeds of the parts, one part after another."""
        return [seed for part in self.parts for seed in part.seeds()]

    def with_seeds(self, seeds: Sequence[int]) -> Self:
        """Return the source with other seeds for the shuffles of its parts."""
        left = iter(seeds)
        return self.of_parts([part.with_seeds([next(left) for _ in part.seeds()]) for part in self.parts])

    def ready(self, memory: int, sharing: int | None = None, ranks: Topology | None = None) -> Self:
        """Return the source with parts that are ready for their shuffles."""
        parts = [part.ready(sharing, ranks, memory) for part in self.parts]
        if all(a is b for a, b in zip(parts, self.parts, strict=True)):
            return self  # with the rows that it keeps
        return self.of_parts(parts)

    def __repr__(self) -> str:
        return f"{self.word}({'; '.join(map(str, self.parts))})"


class CombinedSource(OfParts, Source):
    """The rows of some datasets, combined. It reads at least one row: a plan makes empty batches of the specs."""

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError(f"{self} is endless")
        return self.length

    def read(self, rows: np.ndarray) -> Any:
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
        found, blocks = super().identity(), self.blocks()
        return found if blocks is None else {**found, "blocks": [int(blocks.rows), int(blocks.window)]}
