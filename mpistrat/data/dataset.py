"""Datasets: a source of rows, of known or unknown number, and the transforms that are applied to them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mpistrat.data.distribute.autoshard import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Division, divide
from mpistrat.data.distribute.until_all_end import divide_until_all_end
from mpistrat.data.options import AUTOTUNE, PREFETCH, AutoShardPolicy
from mpistrat.data.pipeline.chain import Chain
from mpistrat.data.pipeline.optional import Elements, NextAsOptional
from mpistrat.data.pipeline.plan import PipelinePlan
from mpistrat.data.pipeline.prefetch import Prefetched, Turns
from mpistrat.data.pipeline.stream import StreamPlan
from mpistrat.data.sources.arrays import ArraySource, RangeSource
from mpistrat.data.sources.sequence import SequenceSource

if TYPE_CHECKING:
    from mpistrat.data.options import Options
    from mpistrat.data.pipeline.transforms import Transform
    from mpistrat.data.rows.contracts import Peers, Source
    from mpistrat.data.sources.iterable import IterableSource


class Dataset(Chain):
    """Rows, or batches of rows, that can be read in any order.

    Made by `from_arrays`, `from_hdf5`, `from_sequence`, `from_iterable` or `range`. A transform returns a new
    dataset and leaves this one as it is; transforms may be chained in any order and mean what they mean in
    tf.data. Nothing is read before somebody iterates, and then only the rows that are needed: on several
    replicas (``strategy.experimental_distribute_dataset``) each reads its own rows.

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
        self,
        source: Source | IterableSource,
        transforms: tuple[Transform, ...] = (),
        options: Options | None = None,
    ):
        super().__init__(source, transforms, options)
        self._iterations = itertools.count()
        self._turns = Turns()

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
    def from_sequence(cls, sequence: Any) -> Dataset:
        """A dataset of the elements of any object with a length and an index.

        Map-style datasets of torch, lists of elements, memory maps, zarr arrays, h5py datasets. An array
        (something with ``shape`` and ``dtype``) is read in runs of rows, or by ``oindex`` where it has that;
        of other objects ``__getitems__`` gets all indices of a batch if there is one, ``__getitem__`` one
        index at a time otherwise.

        Parameters
        ----------
        sequence : object with ``__len__`` and ``__getitem__``
            Equal indices must give equal elements, on every rank. Elements are arrays, numbers or nested
            structures of them, all of the same shapes; a list is one array.

        Returns
        -------
        Dataset

        Raises
        ------
        TypeError
            If the object has no length or no index.
        ValueError
            If it is empty.

        Examples
        --------
        >>> squares = [{"x": i, "y": i * i} for i in range(5)]
        >>> list(Dataset.from_sequence(squares).skip(1).batch(2))[0]
        {'x': array([1, 2]), 'y': array([1, 4])}
        """
        return cls(SequenceSource(sequence))

    @classmethod
    def from_iterable(cls, iterable: Iterable[Any] | Callable[[], Iterable[Any]]) -> IterableDataset:
        """A dataset of what an iterable yields, whose length nobody knows.

        It can only be read from its beginning. Distributed, every replica goes through the whole iterable,
        which must yield the same on all, and keeps the rows of its pieces; at every step the replicas exchange
        a flag that tells whether any of them has rows. Under ``distribute_datasets_from_function``
        every replica has an iterable of its own.

        Parameters
        ----------
        iterable : iterable, or callable that returns one
            Asked for anew in every epoch. A generator can be gone through once only: give the function that
            makes it.

        Returns
        -------
        IterableDataset

        Examples
        --------
        >>> def lines():
        ...     yield from ([1, 2], [3, 4], [5, 6])
        >>> list(Dataset.from_iterable(lines).batch(2))
        [array([[1, 2],
               [3, 4]]), array([[5, 6]])]
        """
        from mpistrat.data.sources.iterable import IterableSource

        return IterableDataset(IterableSource(iterable))

    @classmethod
    def from_hdf5(
        cls,
        files: Any,
        datasets: Any,
        manifest: str | os.PathLike[str] | None = None,
        check_finite: bool = False,
    ) -> Dataset:
        """A dataset of the rows of HDF5 files.

        Files may have different lengths; their rows follow each other in the order of the files. The
        files are described (shapes, lengths, ...) when that is first needed, on several replicas each
        file once for all of them.

        Parameters
        ----------
        files : str, os.PathLike or list of those
            Paths and glob patterns (``**`` included). What a pattern matches is sorted; a file that ``**`` finds
            again by links to folders comes once.
        datasets : str, tuple or dict of str
            Names of HDF5 datasets whose axis 0 is the samples. They give an element its structure: an
            array for ``"x"``, a tuple for ``("x", "y")``, a dict for ``{"image": "x"}``. A compound type
            becomes a structured array; byte order becomes the machine's.
        manifest : path, optional
            A file that keeps the description of the files between jobs, so that the next one need not open
            them all. It is written if it does not exist.
        check_finite : bool
            Whether rows with NaN or infinity in them are refused when they are read, with `NotFiniteError`, which
            names the file, the dataset and the row.

        Returns
        -------
        Dataset

        Raises
        ------
        FileNotFoundError
            If a file does not exist or a pattern matches none.
        ValueError
            If ``files`` is empty.
        DataFileError, DatasetNotFoundError, DatasetMismatchError, EmptyDatasetError
            A process that is alone looks at the first file at once, and at all of them when their lengths are
            first needed. Among several ranks, missing files and all other faults are raised when the dataset
            is distributed, on all ranks alike. `DataFileError` is also raised for a manifest that is
            stale: of other files, or of files that have been written to since.

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
        from mpistrat.data.sources.hdf5 import Hdf5Source

        return cls(Hdf5Source.open(files, datasets, manifest, check_finite))

    # --- questions ------------------------------------------------------------------------

    @property
    def element_spec(self) -> Any:
        """The structure of an element, with an `ArraySpec` for each array.

        Examples
        --------
        >>> Dataset.from_arrays(([[1.0, 2.0]], [3])).batch(4).element_spec
        (ArraySpec(shape=(None, 2), dtype=float64), ArraySpec(shape=(None,), dtype=int64))
        """
        return self._plan.element_spec()

    def cardinality(self) -> int:
        """How many elements there are.

        Returns
        -------
        int
            `INFINITE_CARDINALITY` (-1) for an endless dataset, `UNKNOWN_CARDINALITY` (-2) for one made of an
            iterable.
        """
        return INFINITE_CARDINALITY if self._plan.length is None else self._plan.length

    def __len__(self) -> int:
        if self._plan.length is None:
            raise TypeError("an endless dataset has no length: use take(), or repeat() with a count")
        return self._plan.length

    def __iter__(self) -> NextAsOptional:
        elements = self._plan.elements(next(self._iterations))
        prefetch = self.options().prefetch
        if not prefetch:
            return Elements(elements)
        return Prefetched(elements, PREFETCH if prefetch == AUTOTUNE else prefetch, turns=self._turns)

    # --- inside the package ---------------------------------------------------------------

    @cached_property
    def _plan(self) -> Any:
        return self._planned(self._transforms)

    def _planned(self, transforms: tuple[Transform, ...]) -> Any:
        return PipelinePlan(self._source, transforms)

    def _divided(self, transforms: tuple[Transform, ...], peers: Peers) -> Division:
        """How replicas share it."""
        distribute = self.options().experimental_distribute
        return divide(distribute.auto_shard_policy, self._source, transforms, peers, distribute.balance)

    def _own_length(self) -> int | None:
        """How many elements there are, as far as that is known; None if there is no end."""
        length: int | None = self._plan.length
        return length


class IterableDataset(Dataset):
    """Rows, or batches of rows, that come one after another, nobody knows how many.

    Made by `Dataset.from_iterable`. It has the transforms of `Dataset`; ``shuffle`` needs a ``buffer_size``,
    of which each run is permuted, and there is no ``len``.

    Examples
    --------
    >>> import mpistrat
    >>> dataset = mpistrat.data.Dataset.from_iterable(lambda: (i * i for i in range(5))).batch(2)
    >>> [batch.tolist() for batch in dataset]
    [[0, 1], [4, 9], [16]]
    >>> dataset.cardinality()
    -2
    """

    def cardinality(self) -> int:
        """`UNKNOWN_CARDINALITY` (-2).

        Returns
        -------
        int
        """
        return UNKNOWN_CARDINALITY

    def __len__(self) -> int:
        raise TypeError("nobody knows the length of a dataset that is made of an iterable before its end")

    def _planned(self, transforms: tuple[Transform, ...]) -> Any:
        return StreamPlan(self._source, transforms)

    def _divided(self, transforms: tuple[Transform, ...], peers: Peers) -> Division:
        policy = self.options().experimental_distribute.auto_shard_policy
        if policy is AutoShardPolicy.FILE:
            raise ValueError(
                f"AutoShardPolicy.FILE needs a dataset of files, and this one is made of {self._source}: "
                "use AutoShardPolicy.DATA"
            )
        return divide_until_all_end(policy, self._source, transforms, peers)

    def _own_length(self) -> int:
        return UNKNOWN_CARDINALITY
