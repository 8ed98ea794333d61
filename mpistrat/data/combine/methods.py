"""Methods of a dataset that combine it with others, or make a dataset of its elements."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

from mpistrat import nest
from mpistrat.data.combine import streamed
from mpistrat.data.combine.cached import CachedInFolder, CachedSource
from mpistrat.data.combine.combined import ConcatenatedSource, DatasetPart, ZippedSource
from mpistrat.data.combine.mixed import MixedSource, MixedStream
from mpistrat.data.options import Options
from mpistrat.data.pipeline.chain import Chain
from mpistrat.data.pipeline.definition import Definition
from mpistrat.data.pipeline.transforms import Batch, Transform, before_batch, integer
from mpistrat.data.rows.contracts import Seed
from mpistrat.data.sources.objects import CountSource
from mpistrat.process.files import local_path

if TYPE_CHECKING:
    from typing_extensions import Self

    from mpistrat.data.dataset import Dataset


class Combining(Chain):
    """A chain whose elements can be combined with the elements of others."""

    @classmethod
    def _of(cls, source: Any, transforms: tuple[Transform, ...], options: Options) -> Any:
        """Return the dataset of a source of either kind."""
        raise NotImplementedError

    def _by_function(self, name: str, part: DatasetPart, combine: streamed.Combine) -> Any:
        return self._of(streamed.StreamByFunction(name, [part], combine), (), self._definition.options)

    @classmethod
    def zip(cls, *datasets: Any) -> Dataset[Any]:
        """Return a dataset of the elements of several datasets, side by side, up to the end of the shortest.

        Datasets in batches of one size are zipped row by row: the last batch has as many rows of each.

        Parameters
        ----------
        *datasets : Dataset, or tuple or dict of those
            Each element has this structure.

        Raises
        ------
        TypeError
            For a list, or an object that is not a Dataset.
        ValueError
            If the datasets are in batches of different sizes, or are transformed after `batch`.

        Examples
        --------
        >>> from mpistrat.data import Dataset
        >>> [(int(x), int(y)) for x, y in Dataset.zip(Dataset.range(3), Dataset.range(10, 20))]
        [(0, 10), (1, 11), (2, 12)]
        """
        structure = datasets[0] if len(datasets) == 1 else datasets
        leaves, rebuild = nest.flatten(structure)
        if not leaves:
            raise TypeError("zip() needs at least one dataset")
        # Elsewhere a list is one array, as in tf.data.
        if _has_list(structure):
            raise TypeError("zip() takes datasets, or a tuple or dict of them, not a list: use a tuple")
        after: tuple[Transform, ...] = ()
        definitions = [_definition(dataset, "zip") for dataset in leaves]
        ends = [definition.transforms[-1:] for definition in definitions]
        # Rows are zipped below the batches: last batches could have different numbers of rows.
        if ends[0] and isinstance(ends[0][0], Batch) and all(end == ends[0] for end in ends):
            after = ends[0]
            definitions = [replace(definition, transforms=definition.transforms[:-1]) for definition in definitions]
        parts = [part_of_rows(definition, "zip") for definition in definitions]
        rows = partial(ZippedSource, structure=rebuild([*range(len(leaves))]))
        source = _combined("zip", parts, rows, streamed.zipped(rebuild))
        return cls._of(source, after, _merged(definitions))

    def concatenate(self, dataset: Combining) -> Self:
        """Append the elements of another dataset.

        Parameters
        ----------
        dataset : Dataset
            Its elements have the structure and dtypes of this dataset's.

        Raises
        ------
        DatasetMismatchError
            When rows are first read, if structure or dtypes differ.

        Examples
        --------
        >>> from mpistrat.data import Dataset
        >>> [int(x) for x in Dataset.range(2).concatenate(Dataset.range(7, 9))]
        [0, 1, 7, 8]
        """
        definitions = [self._definition, _definition(dataset, "concatenate")]
        parts = [part_of_rows(definition, "concatenate") for definition in definitions]
        source = _combined("concatenate", parts, ConcatenatedSource, streamed.concatenated)
        return self._of(source, (), _merged(definitions))

    def enumerate(self, start: int = 0) -> Dataset[Any]:
        """Return a dataset of pairs: the number of an element, and the element.

        Parameters
        ----------
        start : int
            The number of the first element.

        Examples
        --------
        >>> from mpistrat.data import Dataset
        >>> [(int(i), int(x)) for i, x in Dataset.range(5, 8).enumerate()]
        [(0, 5), (1, 6), (2, 7)]
        """
        start = integer(start, "the start of enumerate()", -(2**62))
        part = part_of_rows(self._definition, "enumerate")
        if part.streamed:
            return self._by_function(f"enumerate({start})", part, streamed.numbered(start))
        source = ZippedSource([DatasetPart(CountSource(start), ()), part], (0, 1))
        return self._of(source, (), self._definition.options)

    def cache(self, filename: str | os.PathLike[str] = "") -> Self:
        """Keep the elements in memory, or in a folder, after they were made once.

        What comes before is done once only: files are read, functions are called, a shuffle has one order. Put
        `shuffle` and random functions after it. In memory, each rank keeps the rows that it has read.

        Parameters
        ----------
        filename : path, optional
            A folder for the rows, the same on all ranks. They are written at once when their number or one of them is
            first needed, or the dataset is distributed. All ranks write them together, each its part. Where a folder
            belongs to a node, each node has all rows. Later programs read the rows by their numbers. Rows are arrays of
            numbers, each with one shape and dtype. Those of a stream get a length.

        Raises
        ------
        ValueError
            If the dataset is endless, or if anything follows `batch`. When rows are needed, if the folder has rows of
            another dataset: files, their times of writing, transforms, seeds or the code of functions differ, or one
            of eight rows that are made again. Other changes are not seen, such as a new value in a Zarr store. Also if
            the dataset has no rows, or has other rows each time that they are made.
        DatasetMismatchError, TypeError
            When rows are written to a folder, if their shapes or dtypes differ, or HDF5 has no type for them.

        Examples
        --------
        >>> from mpistrat.data import Dataset
        >>> calls = []
        >>> def double(x):
        ...     calls.append(int(x))
        ...     return 2 * x
        >>> cached = Dataset.range(3).map(double).cache()
        >>> [[int(x) for x in cached] for epoch in range(2)], calls
        ([[0, 2, 4], [0, 2, 4]], [0, 1, 2])

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     kept = Dataset.range(3).map(double).cache(folder)
        ...     [int(x) for x in kept.shuffle(seed=1)], int(kept[1])
        ([2, 4, 0], 2)
        """
        definition = self._definition
        at = len(before_batch(definition.transforms))
        after = definition.transforms[at:]
        if len(after) > 1:
            raise ValueError(
                f"cache() keeps single rows, but {after[1]} follows batch(): call it before batch(), or directly after"
            )
        part = part_of_rows(replace(definition, transforms=definition.transforms[:at]), "cache")
        if part.endless:
            raise ValueError("cache() keeps all rows, but this dataset is endless: call cache() before repeat()")
        if filename:
            return self._of(CachedInFolder([part], local_path(filename)), after, definition.options)
        kind = streamed.CachedStream if part.streamed else CachedSource
        return self._of(kind([part]), after, definition.options)

    @classmethod
    def sample_from_datasets(
        cls,
        datasets: Sequence[Combining],
        weights: Sequence[float] | None = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,
    ) -> Dataset[Any]:
        """Return a dataset whose every element is the next one of a dataset that is drawn by weight.

        The draws are the same in every epoch, on all replicas, and for any number of replicas.

        Parameters
        ----------
        datasets : sequence of Dataset
            Their elements have one structure and equal dtypes.
        weights : sequence of float, optional
            How often each dataset is drawn. They need not add up to 1. By default all weights are equal.
        seed : int, optional
            Makes the draws the same in every run of the program. Without a seed, one is drawn.
        stop_on_empty_dataset : bool
            Whether the elements end when a dataset is drawn that has none left. Otherwise the others go on.

        Raises
        ------
        ValueError
            If there are no datasets, or the weights do not fit them.
        DatasetMismatchError
            When rows are first read, if structure or dtypes differ.

        Examples
        --------
        >>> from mpistrat.data import Dataset
        >>> some, others = Dataset.range(100), Dataset.range(1000, 2000)
        >>> mixed = Dataset.sample_from_datasets([some, others], [1, 9], seed=1)
        >>> len(mixed), sum(int(x) < 100 for x in mixed.take(200))
        (1100, 13)
        """
        datasets = [*datasets]
        if not datasets:
            raise ValueError("sample_from_datasets() needs at least one dataset")
        values = [1.0] * len(datasets) if weights is None else [float(weight) for weight in weights]
        if len(values) != len(datasets):
            raise ValueError(
                f"sample_from_datasets() needs a weight for each of the {len(datasets)} datasets, not {len(values)}"
            )
        if not all(math.isfinite(value) and value >= 0 for value in values) or not sum(values):
            raise ValueError(f"weights must be finite and at least 0, and one of them above 0, got {values}")
        drawn = seed is None
        number = secrets.randbits(63) if drawn else integer(seed, "the seed of sample_from_datasets()", -(2**63))
        definitions = [_definition(dataset, "sample_from_datasets") for dataset in datasets]
        parts = [part_of_rows(definition, "sample_from_datasets") for definition in definitions]
        kind = MixedStream if any(part.streamed for part in parts) else MixedSource
        source = kind(parts, values, Seed(number, not drawn), bool(stop_on_empty_dataset))
        return cls._of(source, (), _merged(definitions))


def _definition(dataset: Any, method: str) -> Definition:
    if not isinstance(dataset, Combining):
        raise TypeError(f"{method}() takes datasets (mpistrat.data.Dataset), not {type(dataset).__name__}")
    return dataset.definition


def part_of_rows(definition: Definition, name: str) -> DatasetPart:
    if definition.batch_size is not None:
        raise ValueError(f"{name}() takes datasets of single rows, but {definition} has batches: call batch() after it")
    return DatasetPart(definition.source, definition.transforms)


def _combined(name: str, parts: Sequence[DatasetPart], rows: Any, stream: streamed.Combine) -> Any:
    """Return the source of some parts: by rows in any order, or as a stream if a part is one."""
    if any(part.streamed for part in parts):
        return streamed.StreamByFunction(name, parts, stream)
    return rows(parts)


def _merged(definitions: Sequence[Definition]) -> Options:
    return reduce(Options.merge, [definition.options for definition in definitions], Options())


def _has_list(structure: Any) -> bool:
    if isinstance(structure, dict):
        return any(map(_has_list, structure.values()))
    return isinstance(structure, list) or (isinstance(structure, tuple) and any(map(_has_list, structure)))
