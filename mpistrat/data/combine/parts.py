"""The parts of a source that is made of other datasets, and what all such sources have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.data.pipeline.definition import seeds_of, with_seeds
from mpistrat.data.pipeline.plan import PipelinePlan
from mpistrat.data.pipeline.stream import StreamPlan
from mpistrat.data.pipeline.transforms import Shuffle, Transform, length_of
from mpistrat.data.rows import elements, spec
from mpistrat.data.rows.blocks import Blocks
from mpistrat.data.rows.contracts import IN_MEMORY_AT_ONCE, Seed, Source

if TYPE_CHECKING:
    from typing_extensions import Self

    from mpistrat.runtime.topology import Topology


class DatasetPart:
    """A source with its transforms, of single rows.

    Parameters
    ----------
    source : Source or StreamSource
    transforms : sequence of Transform
    """

    def __init__(self, source: Any, transforms: Sequence[Transform]):
        self.source, self.transforms = source, tuple(transforms)
        self.streamed: bool = source.streamed

    @cached_property
    def plan(self) -> Any:
        """The plan by which rows are read."""
        return (StreamPlan if self.streamed else PipelinePlan)(self.source, self.transforms)

    @property
    def length(self) -> int | None:
        """Number of rows. None if they are endless, or their number is unknown."""
        return None if self.streamed else length_of(self.source.length, self.transforms)

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
        found: np.ndarray = self.plan.locate(np.empty(0, np.int64), 0)
        return found

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
        found: Blocks | None = self.source.blocks()
        return found

    def elements(self, iteration: int) -> Iterator[Any]:
        """Return an iterator over the rows of an iteration."""
        found: Iterator[Any] = self.plan.elements(iteration)
        return found

    def seeds(self) -> list[Seed]:
        """Return the seeds of all shuffles."""
        return seeds_of(self.source, self.transforms)

    def with_seeds(self, seeds: Sequence[int]) -> DatasetPart:
        """Return the part with other seeds."""
        return DatasetPart(*with_seeds(self.source, self.transforms, seeds))

    def ready(self, memory: int, sharing: int | None, ranks: Topology | None) -> DatasetPart:
        """Return the part with its source ready for its shuffles; see `Source.for_shuffle`."""
        source = self.source.ready(memory, sharing, ranks)
        if not self.streamed and any(isinstance(each, Shuffle) for each in self.transforms):
            source = source.for_shuffle(memory, self.length, sharing, ranks)
        return self if source is self.source else DatasetPart(source, self.transforms)

    def identity(self) -> dict[str, Any]:
        """Return what must be equal to restore a state."""
        steps = [each.without_numbers() for each in self.transforms]
        found = {**self.source.identity(), "pipeline": steps}
        blocks = None if self.streamed else self.source.blocks()
        if blocks is not None and any(isinstance(each, Shuffle) for each in self.transforms):
            found["blocks"] = [int(blocks.rows), int(blocks.window)]
        return found

    def fingerprint(self) -> str:
        """Return what must be equal on all ranks."""
        return ", ".join(map(str, (self.source.fingerprint(), *self.transforms)))

    def __repr__(self) -> str:
        return ", ".join(map(str, (self.source, *self.transforms)))


class OfParts:
    """The methods of a source that let its parts do the same. It stands before `Source` or `StreamSource`.

    Parameters
    ----------
    parts : sequence of DatasetPart

    Attributes
    ----------
    word : str
        The kind of combination.
    """

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
        parts = [part.ready(memory, sharing, ranks) for part in self.parts]
        if all(a is b for a, b in zip(parts, self.parts, strict=True)):
            return self  # with the rows that it keeps
        return self.of_parts(parts)

    def __repr__(self) -> str:
        return f"{self.word}({'; '.join(map(repr, self.parts))})"


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
