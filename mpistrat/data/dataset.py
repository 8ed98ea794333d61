"""A dataset: a source of rows and the transforms that are applied to them."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mpistrat.data.options import SHARD_HINT, Options
from mpistrat.data.plan import Plan
from mpistrat.data.source_arrays import ArraySource, RangeSource
from mpistrat.data.transforms import (
    Batch,
    Map,
    Repeat,
    Shard,
    Shuffle,
    Skip,
    Take,
    Transform,
    integer,
)

if TYPE_CHECKING:
    from mpistrat.data.contracts import Source

INFINITE_CARDINALITY = -1
"""What `Dataset.cardinality` says of an endless dataset."""


class Dataset:
    """Rows, or batches of rows, that can be read in any order.

    Made by `from_arrays`, `from_hdf5` or `range`. A transform returns a new dataset and leaves this one
    as it is; transforms may be chained in any order and mean what they mean in tf.data. Nothing is read
    before somebody iterates, and then only the rows that are needed: on several replicas
    (``strategy.experimental_distribute_dataset``) each reads its own rows.

    Every iteration is a new epoch: the first ``for`` loop over this object is epoch 0, the next epoch 1,
    and a shuffled dataset comes in another order each time, the same one in every run of the program if
    a seed was given.

    Examples
    --------
    >>> dataset = Dataset.from_arrays({"x": [1.0, 2.0, 3.0], "y": [0, 1, 0]})
    >>> for batch in dataset.map(lambda row: (row["x"] * 10, row["y"])).batch(2):
    ...     print(batch)
    (array([10., 20.]), array([0, 1]))
    (array([30.]), array([0]))
    """

    def __init__(
        self, source: Source, transforms: tuple[Transform, ...] = (), options: Options | None = None
    ):
        self._source = source
        self._transforms = transforms
        self._options = options or Options()
        self._iterations = itertools.count()

    # --- making one -----------------------------------------------------------------------

    @classmethod
    def from_arrays(cls, tree: Any) -> Dataset:
        """A dataset of the rows of arrays.

        Parameters
        ----------
        tree : array or nested structure of arrays
            Tuples, dicts, namedtuples and dataclasses are structure, a list is one array (as in tf.data).
            All arrays have the same length along axis 0, the samples.

        Returns
        -------
        Dataset

        Raises
        ------
        ValueError
            If lengths differ, or an array is a scalar.

        Examples
        --------
        >>> [int(x) for x in Dataset.from_arrays([1, 2, 3])]
        [1, 2, 3]
        """
        return cls(ArraySource(tree))

    @classmethod
    def from_tensor_slices(cls, tensors: Any) -> Dataset:
        """The name that tf.data has for `from_arrays`.

        Parameters
        ----------
        tensors : array or nested structure of arrays
            As for `from_arrays`.

        Returns
        -------
        Dataset
        """
        return cls.from_arrays(tensors)

    @classmethod
    def range(cls, start: int, stop: int | None = None, step: int = 1) -> Dataset:
        """The integers of a range, as int64.

        Parameters
        ----------
        start, stop, step : int
            As for Python's ``range``: with one argument, the numbers from 0 up to it.

        Returns
        -------
        Dataset

        Examples
        --------
        >>> list(Dataset.range(5).batch(3))
        [array([0, 1, 2]), array([3, 4])]
        """
        return cls(RangeSource(range(start) if stop is None else range(start, stop, step)))

    @classmethod
    def from_hdf5(cls, files: Any, datasets: Any) -> Dataset:
        """A dataset of the rows of HDF5 files.

        Files may have different lengths; their rows follow each other in the order of the files. The
        files are described (shapes, lengths, ...) when that is first needed, on several replicas each
        file once for all of them.

        Parameters
        ----------
        files : str, os.PathLike or list of those
            Paths and glob patterns (``**`` included). What a pattern matches is sorted.
        datasets : str, tuple or dict of str
            Names of HDF5 datasets whose axis 0 is the samples. They give an element its structure: an
            array for ``"x"``, a tuple for ``("x", "y")``, a dict for ``{"image": "x"}``. A compound type
            becomes a structured array; byte order becomes the machine's.

        Returns
        -------
        Dataset

        Raises
        ------
        FileNotFoundError
            If a file does not exist or a pattern matches none.
        ValueError
            If ``files`` is empty.
        DatasetNotFoundError
            If the first file lacks one of the datasets. Faults of the other files are raised when they
            are described: on all ranks alike, `DataFileError`, `DatasetNotFoundError`,
            `DatasetMismatchError` or `EmptyDatasetError`.

        Examples
        --------
        >>> import h5py, os, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> for name, rows in ("a", 3), ("b", 2):
        ...     with h5py.File(os.path.join(folder.name, name + ".h5"), "w") as f:
        ...         f["x"] = range(rows)
        >>> list(Dataset.from_hdf5(os.path.join(folder.name, "*.h5"), "x").batch(4))
        [array([0, 1, 2, 0]), array([1])]
        >>> folder.cleanup()
        """
        from mpistrat.data.source_hdf5 import Hdf5Source

        return cls(Hdf5Source.open(files, datasets))

    # --- transforms -----------------------------------------------------------------------

    def map(self, fn: Callable[..., Any]) -> Dataset:
        """Apply a function to every element.

        Before `batch` it gets one element. After `batch` it gets a batch, on several replicas the
        replica's piece of it, which may have no rows.

        Parameters
        ----------
        fn : callable
            Gets the element, or, if that is a tuple, its parts as separate arguments. May return any
            nested structure. Elements that are then batched must agree in structure and shape.

        Returns
        -------
        Dataset

        Notes
        -----
        For `element_spec`, and for an empty piece on a replica that had no row yet, ``fn`` is tried on
        the first row of the source.

        Examples
        --------
        >>> pairs = Dataset.from_arrays(([1, 2], [10, 20]))
        >>> [int(x) for x in pairs.map(lambda a, b: a + b)]
        [11, 22]
        """
        if not callable(fn):
            raise TypeError(f"map() needs a function, not {fn!r}")
        return self._then(Map(fn))

    def shuffle(
        self,
        buffer_size: int | None = None,
        seed: int | None = None,
        reshuffle_each_iteration: bool = True,
    ) -> Dataset:
        """Permute all elements.

        The permutation is over the whole dataset, uniformly, whatever the size of a buffer; it is the
        same on all replicas and does not depend on their number.

        Parameters
        ----------
        buffer_size : int, optional
            For programs written for tf.data. Has a meaning for an endless dataset only (`shuffle` after
            ``repeat()``), where each run of that many elements is permuted.
        seed : int, optional
            Makes the order the same in every run of the program. Without a seed, one is drawn; on
            several replicas that of replica 0 holds for all.
        reshuffle_each_iteration : bool
            Whether every epoch, and every repetition by `repeat`, has an order of its own.

        Returns
        -------
        Dataset

        Raises
        ------
        ValueError
            If the dataset is endless and there is no ``buffer_size``.

        Examples
        --------
        >>> dataset = Dataset.range(6).shuffle(seed=3).batch(6)
        >>> [batch.tolist() for epoch in range(2) for batch in dataset]
        [[1, 0, 5, 4, 2, 3], [2, 5, 0, 1, 4, 3]]
        """
        if buffer_size is not None:
            buffer_size = integer(buffer_size, "the buffer_size of shuffle()", 1)
        if seed is None:
            shuffle = Shuffle(secrets.randbits(63), False, buffer_size, bool(reshuffle_each_iteration))
        else:
            seed = integer(seed, "the seed of shuffle()", -(2**63))
            shuffle = Shuffle(seed, True, buffer_size, bool(reshuffle_each_iteration))
        return self._then(shuffle)

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Dataset:
        """Stack consecutive rows.

        On several replicas this is the size of the *global* batch, which they share.

        Parameters
        ----------
        batch_size : int
            Rows of a batch.
        drop_remainder : bool
            Whether a last batch with fewer rows is left out.

        Returns
        -------
        Dataset

        Raises
        ------
        TypeError
            If ``batch_size`` is no integer.
        ValueError
            If it is smaller than 1, or the dataset is batched already.

        Examples
        --------
        >>> len(Dataset.range(7).batch(3)), len(Dataset.range(7).batch(3, drop_remainder=True))
        (3, 2)
        """
        size = integer(batch_size, "the batch size", 1)
        if self.batch_size is not None:
            raise ValueError(
                f"this dataset is already in batches of {self.batch_size}: batches cannot be batched again, "
                "call batch() once"
            )
        return self._then(Batch(size, bool(drop_remainder)))

    def repeat(self, count: int | None = None) -> Dataset:
        """The dataset several times over; a `shuffle` before it permutes every repetition anew.

        Parameters
        ----------
        count : int, optional
            How many times; None or -1 for ever.

        Returns
        -------
        Dataset

        Examples
        --------
        >>> list(Dataset.range(3).repeat(2).batch(4))
        [array([0, 1, 2, 0]), array([1, 2])]
        """
        if count is not None:
            count = integer(count, "the count of repeat()", -1)
        return self._then(Repeat(None if count == -1 else count))

    def take(self, count: int) -> Dataset:
        """The first elements.

        Parameters
        ----------
        count : int
            How many, -1 for all.

        Returns
        -------
        Dataset

        Examples
        --------
        >>> [int(x) for x in Dataset.range(9).skip(2).take(3)]
        [2, 3, 4]
        """
        return self._then(Take(integer(count, "the count of take()", -1)))

    def skip(self, count: int) -> Dataset:
        """All but the first elements.

        Parameters
        ----------
        count : int
            How many to leave out, -1 for all.

        Returns
        -------
        Dataset
        """
        return self._then(Skip(integer(count, "the count of skip()", -1)))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Every ``num_shards``-th element, from ``index`` on.

        Needed with ``distribute_datasets_from_function`` only: a distributed dataset divides itself.

        Parameters
        ----------
        num_shards : int
            Among how many the elements are divided.
        index : int
            Which part this is. ``shard(SHARD_HINT, SHARD_HINT)`` leaves both to AutoShardPolicy.HINT.

        Returns
        -------
        Dataset

        Raises
        ------
        ValueError
            If ``index`` is not from 0 to ``num_shards - 1``.

        Examples
        --------
        >>> [int(x) for x in Dataset.range(7).shard(3, 1)]
        [1, 4]
        """
        num_shards = integer(num_shards, "num_shards", SHARD_HINT)
        index = integer(index, "the index of a shard", SHARD_HINT)
        if (num_shards, index) != (SHARD_HINT, SHARD_HINT) and not 0 <= index < num_shards:
            raise ValueError(
                f"the index of a shard must be from 0 to num_shards - 1, got {index} of {num_shards} shards"
            )
        return self._then(Shard(num_shards, index))

    def with_options(self, options: Options) -> Dataset:
        """The dataset with options, which win over options given earlier.

        Parameters
        ----------
        options : Options
            Copied: changing it afterwards changes nothing here.

        Returns
        -------
        Dataset
        """
        if not isinstance(options, Options):
            raise TypeError(f"with_options() needs an Options object, not {options!r}")
        return Dataset(self._source, self._transforms, self._options.merge(options))

    # --- questions ------------------------------------------------------------------------

    def options(self) -> Options:
        """The options, as a copy.

        Returns
        -------
        Options
        """
        return Options().merge(self._options)

    @property
    def element_spec(self) -> Any:
        """The structure of an element, with an `ArraySpec` for each array.

        Examples
        --------
        >>> Dataset.from_arrays(([[1.0, 2.0]], [3])).batch(4).element_spec
        (ArraySpec(shape=(None, 2), dtype=float64), ArraySpec(shape=(None,), dtype=int64))
        """
        return self._plan.element_spec()

    @property
    def batch_size(self) -> int | None:
        """Rows of a batch, None if the elements are single rows."""
        return next((each.size for each in self._transforms if isinstance(each, Batch)), None)

    def cardinality(self) -> int:
        """How many elements there are.

        Returns
        -------
        int
            `INFINITE_CARDINALITY` (-1) for an endless dataset.
        """
        return INFINITE_CARDINALITY if self._plan.length is None else self._plan.length

    def __len__(self) -> int:
        if self._plan.length is None:
            raise TypeError("an endless dataset has no length: use take(), or repeat() with a count")
        return self._plan.length

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        return self._plan.elements(next(self._iterations))

    def __repr__(self) -> str:
        return "<Dataset: " + ", ".join(map(str, (self._source, *self._transforms))) + ">"

    # --- inside the package ---------------------------------------------------------------

    @cached_property
    def _plan(self) -> Plan:
        return Plan(self._source, self._transforms)

    def _then(self, transform: Transform) -> Dataset:
        return Dataset(self._source, (*self._transforms, transform), self._options)


def drawn_seeds(dataset: Dataset) -> list[int]:
    """The seeds of those shuffles to which the program gave none."""
    return [each.seed for each in dataset._transforms if isinstance(each, Shuffle) and not each.seeded]


def with_drawn_seeds(transforms: tuple[Transform, ...], seeds: list[int]) -> tuple[Transform, ...]:
    """The transforms with other seeds where the program gave none."""
    remaining = iter(seeds)
    return tuple(
        replace(each, seed=next(remaining, each.seed))
        if isinstance(each, Shuffle) and not each.seeded
        else each
        for each in transforms
    )
