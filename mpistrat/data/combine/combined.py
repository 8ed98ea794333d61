"""Sources of rows of other datasets, their parts: each row is one of a part, or has a row of each part."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import nest
from mpistrat.data.errors import DatasetMismatchError
from mpistrat.data.pipeline.chosen import Chosen
from mpistrat.data.pipeline.definition import Definition
from mpistrat.data.pipeline.transforms import Seeded, Shuffle, length_of
from mpistrat.data.rows import elements, spec
from mpistrat.data.rows.blocks import Blocks
from mpistrat.data.rows.contracts import IN_MEMORY_AT_ONCE, Seed, Source
from mpistrat.data.rows.spec import ArraySpec
from mpistrat.runtime.topology import Topology

if TYPE_CHECKING:
    from typing_extensions import Self


class DatasetPart(Definition):
    """A source with its transforms, of single rows."""

    @property
    def endless(self) -> bool:
        """Whether the rows have no end. No file is opened to answer."""
        from mpistrat.data.sources.files import FileSource  # a late import: loads h5py

        if self.streamed:
            return False
        parts = getattr(self.source, "parts", ())
        # Files end. One row stands for their number, which would have to be read from them.
        known = isinstance(self.source, FileSource) or (parts and not any(part.endless for part in parts))
        # Transforms that choose by numbers are left out: they may read a column, and make no rows endless.
        others = (step for step in self.transforms if not isinstance(step, (Chosen, Seeded)))
        return length_of(1 if known else self.source.length, others) is None

    @cached_property
    def _no_numbers(self) -> np.ndarray:
        # Also without rows, the array has the columns of a row's numbers.
        return self.plan.locate(np.empty(0, np.int64), 0)

    @property
    def numbers_of_row(self) -> int:
        """How many numbers a row has."""
        return 1 if self._no_numbers.ndim == 1 else self._no_numbers.shape[1]

    def numbers(self, ks: np.ndarray, iteration: int) -> np.ndarray:
        """Return the numbers of rows as an array of two axes."""
        numbers: np.ndarray = self.plan.locate(ks, iteration)
        # NumPy cannot infer an axis of an array without elements.
        return numbers.reshape(len(ks), -1) if len(ks) else numbers.reshape(0, self.numbers_of_row)

    def of_numbers(self, numbers: np.ndarray) -> np.ndarray:
        """Return columns of `numbers`, as the plan needs them."""
        return numbers[:, 0] if self._no_numbers.ndim == 1 else numbers

    @property
    def in_memory(self) -> bool:
        """Whether the rows lie in memory, and no function of the program makes them."""
        return not self.streamed and self.plan.in_memory and not self.plan.maps

    def blocks(self) -> Blocks | None:
        """Return which rows are best read together, where the transforms keep the rows in their places."""
        if self.streamed or any(step.reorders for step in self.transforms):
            return None
        return self.source.blocks()

    def identity(self) -> dict[str, Any]:
        """Return what must be equal to restore a state."""
        described = self.described()
        identity = {**described["source"], "pipeline": described["pipeline"]}
        blocks = None if self.streamed else self.source.blocks()
        if blocks is not None and any(isinstance(step, Shuffle) for step in self.transforms):
            identity["blocks"] = [int(blocks.rows), int(blocks.window)]
        return identity

    def fingerprint(self) -> str:
        """Return what must be equal on all ranks."""
        return ", ".join(map(str, (self.source.fingerprint(), *self.transforms)))

    def __str__(self) -> str:
        return ", ".join(map(str, (self.source, *self.transforms)))


class OfParts:
    """The methods of a source that call the same method of its parts. A base before `Source` or `StreamSource`."""

    name: str

    def __init__(self, parts: Sequence[DatasetPart]):
        self.parts = parts

    def of_parts(self, parts: Sequence[DatasetPart]) -> Self:
        """Return the same combination of other parts."""
        return type(self)(parts)

    def fingerprint(self) -> Any:
        """Return the kind of combination, and the fingerprints of its parts."""
        return f"{self.name}({'; '.join(part.fingerprint() for part in self.parts)})"

    def identity(self) -> dict[str, Any]:
        """Return the kind of combination, and the identities of its parts."""
        return {"source": self.name, "parts": [part.identity() for part in self.parts]}

    def versions(self) -> dict[str, list[int]]:
        """Return the versions of the files of all parts."""
        return {file: version for part in self.parts for file, version in part.source.versions().items()}

    def agree(self, ranks: Topology) -> None:
        """Let every part agree with the other ranks. Collective."""
        for part in self.parts:
            part.agree(ranks)

    def seeds(self) -> list[Seed]:
        """Return the seeds of the parts, one part after another."""
        return [seed for part in self.parts for seed in part.seeds()]

    def with_seeds(self, seeds: Sequence[int]) -> Self:
        """Return the source with other seeds for the shuffles of its parts."""
        remaining = iter(seeds)
        return self.of_parts([part.with_seeds([next(remaining) for _ in part.seeds()]) for part in self.parts])

    def ready(self, memory: int, sharing: int | None = None, ranks: Topology | None = None) -> Self:
        """Return the source with parts that are ready for their shuffles."""
        parts = [part.ready(sharing, ranks, memory) for part in self.parts]
        if all(a is b for a, b in zip(parts, self.parts, strict=True)):
            return self  # with the rows that it keeps, which another epoch would make again
        return self.of_parts(parts)

    def __repr__(self) -> str:
        return f"{self.name}({'; '.join(map(str, self.parts))})"


class CombinedSource(OfParts, Source):
    """The rows of some datasets, combined. It reads at least one row: a plan makes empty batches of the specs."""

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError(f"{self} is endless")
        return self.length

    def read(self, rows: np.ndarray) -> Any:
        return elements.stack(self.read_list(rows), elements.dtypes_of(self.element_spec()))

    @property
    def in_memory(self) -> bool:
        """Whether the rows of all parts lie in memory."""
        return all(part.in_memory for part in self.parts)

    def rows_in_two_reads(self, share: float) -> int:
        """Return the number of rows in 512 KiB if they lie in memory."""
        return IN_MEMORY_AT_ONCE // max(1, spec.row_bytes(self.element_spec())) if self.in_memory else 1

    def announced(self) -> bool:
        """Return False: parts are not read ahead."""
        return False

    def identity(self) -> dict[str, Any]:
        identity, blocks = super().identity(), self.blocks()
        return identity if blocks is None else {**identity, "blocks": [int(blocks.rows), int(blocks.window)]}


class ChosenSource(CombinedSource):
    """Rows of some parts. A row has the number of its part, and the numbers that it has there."""

    def chosen(self, ks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of the part of each row, and the number of the row in that part."""
        raise NotImplementedError

    def element_spec(self) -> Any:
        """Return the structure of one row, or raise DatasetMismatchError. None is a dimension in which parts differ."""
        common = self.parts[0].plan.element_spec()
        for number, part in enumerate(self.parts[1:], 1):
            common = common_spec((0, common), (number, part.plan.element_spec()))
        return common

    def ready(self, memory: int, sharing: int | None = None, ranks: Topology | None = None) -> Self:
        """Return the source with parts that are ready for their shuffles, and are alike."""
        source = super().ready(memory, sharing, ranks)
        # Parts that differ raise here, on all ranks, and not at the first row of the other part.
        source.element_spec()
        return source

    def numbers(self, ks: np.ndarray, iteration: int) -> np.ndarray:
        """Return the number of the part of each row, and its numbers there."""
        # Rows of parts with fewer numbers have zeros in the last columns.
        numbers = np.zeros((len(ks), 1 + max(part.numbers_of_row for part in self.parts)), np.int64)
        if len(ks):
            numbers[:, 0], inside = self.chosen(ks)
            for number, part in enumerate(self.parts):
                positions = np.flatnonzero(numbers[:, 0] == number)
                if len(positions):
                    numbers[positions, 1 : 1 + part.numbers_of_row] = part.numbers(inside[positions], iteration)
        return numbers

    def read_list(self, rows: np.ndarray) -> list[Any]:
        elements: list[Any] = [None] * len(rows)
        for part, positions, numbers in self._divided(rows):
            for position, row in zip(positions.tolist(), part.plan.read_list(numbers), strict=True):
                elements[position] = row
        return elements

    def read(self, rows: np.ndarray) -> Any:
        divided = self._divided(rows)
        trees = [part.plan.read_rows(numbers) for part, _, numbers in divided]
        # Rows of one part need no copy.
        if len(trees) == 1:
            return trees[0]
        # Of the arrays that were read: shapes of rows may differ from batch to batch.
        specs = [nest.map_structure(lambda x: ArraySpec(x.shape[1:], x.dtype), tree) for tree in trees]
        for other in specs[1:]:
            if other != specs[0]:
                raise DatasetMismatchError(
                    f"rows of one batch must be alike, but {self} has rows of {specs[0]} and of {other}: map() one of "
                    "the datasets to the form of the other"
                )
        _, rebuild = nest.flatten(trees[0])
        columns = zip(*(nest.flatten(tree)[0] for tree in trees), strict=True)
        leaves = []
        for column in columns:
            out = np.empty((len(rows), *column[0].shape[1:]), column[0].dtype)
            for values, (_, positions, _) in zip(column, divided, strict=True):
                out[positions] = values
            leaves.append(out)
        return rebuild(leaves)

    def _divided(self, rows: np.ndarray) -> list[tuple[DatasetPart, np.ndarray, np.ndarray]]:
        """Return each part that has some of the rows, their places, and their numbers in the part."""
        divided = []
        for number, part in enumerate(self.parts):
            positions = np.flatnonzero(rows[:, 0] == number)
            if len(positions):
                divided.append((part, positions, part.of_numbers(rows[positions, 1 : 1 + part.numbers_of_row])))
        return divided


def common_spec(a: tuple[int, Any], b: tuple[int, Any]) -> Any:
    """Return the structure of elements of two datasets, given with their numbers, or raise DatasetMismatchError."""
    (number, one), (number_of_other, other) = a, b
    leaves, rebuild = nest.flatten(one)
    others, _ = nest.flatten(other)
    same = nest.take_apart(one).form == nest.take_apart(other).form
    if not same or any(a.dtype != b.dtype or len(a.shape) != len(b.shape) for a, b in zip(leaves, others, strict=True)):
        raise DatasetMismatchError(
            f"datasets that follow each other must have elements of one structure and dtype, but dataset {number} has "
            f"{one} and dataset {number_of_other} has {other}: map() one of them to the form of the other"
        )
    return rebuild(
        [
            ArraySpec([m if m == n else None for m, n in zip(a.shape, b.shape, strict=True)], a.dtype)
            for a, b in zip(leaves, others, strict=True)
        ]
    )


class ConcatenatedSource(ChosenSource):
    """All rows of the first part, then all rows of the next. An endless part is the last."""

    name = "concatenate"

    @property
    def length(self) -> int | None:
        lengths = [part.length for part in self.parts]
        finite = [length for length in lengths if length is not None]
        return sum(finite) if len(finite) == len(lengths) else None

    def chosen(self, ks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        starts = self._starts()
        which = starts.searchsorted(ks, side="right") - 1
        return which, ks - starts[which]

    def blocks(self) -> Blocks | None:
        """Return the blocks of the largest part, in all parts."""
        blocks = [part.blocks() for part in self.parts]
        known = [of_part for of_part in blocks if of_part is not None]
        if len(known) < len(blocks) or self.length is None:
            return None
        starts = [start + of_part.starts[:-1] for start, of_part in zip(self._starts(), known, strict=True)]
        largest = max(known, key=lambda of_part: int(of_part.starts[-1]))
        return largest._replace(starts=np.concatenate([*starts, [self.length]]))

    def _starts(self) -> np.ndarray:
        starts = [0]
        for part in self.parts[:-1]:
            # No row follows an endless part.
            if part.length is None:
                break
            starts.append(starts[-1] + part.length)
        return np.array(starts, np.int64)


class ZippedSource(CombinedSource):
    """Row k of all parts, in a structure whose leaves stand for the parts in order, up to the end of the shortest."""

    name = "zip"

    def __init__(self, parts: Sequence[DatasetPart], structure: Any):
        super().__init__(parts)
        self._structure = structure
        _, self._rebuild = nest.flatten(structure)

    def of_parts(self, parts: Sequence[DatasetPart]) -> Self:
        return type(self)(parts, self._structure)

    @property
    def length(self) -> int | None:
        return min((part.length for part in self.parts if part.length is not None), default=None)

    def element_spec(self) -> Any:
        return self._rebuild([part.plan.element_spec() for part in self.parts])

    def numbers(self, ks: np.ndarray, iteration: int) -> np.ndarray:
        return np.concatenate([part.numbers(ks, iteration) for part in self.parts], axis=1)

    def read_list(self, rows: np.ndarray) -> list[Any]:
        columns = [part.plan.read_list(part.of_numbers(numbers)) for part, numbers in self._divided(rows)]
        return [self._rebuild(list(row)) for row in zip(*columns, strict=True)]

    def read(self, rows: np.ndarray) -> Any:
        return self._rebuild([part.plan.read_rows(part.of_numbers(numbers)) for part, numbers in self._divided(rows)])

    def blocks(self) -> Blocks | None:
        """Return the blocks of the first part that has some, if each row has its own number in it."""
        for part in self.parts:
            blocks = part.blocks()
            if blocks is not None and self.length is not None:
                return blocks.in_one_run(self.length) if blocks.starts[-1] != self.length else blocks
        return None

    @cached_property
    def _ends(self) -> list[int]:
        return [0, *np.cumsum([part.numbers_of_row for part in self.parts]).tolist()]

    def _divided(self, rows: np.ndarray) -> list[tuple[DatasetPart, np.ndarray]]:
        cuts = pairwise(self._ends)
        return [(part, rows[:, first:last]) for part, (first, last) in zip(self.parts, cuts, strict=True)]
