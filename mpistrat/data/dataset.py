"""Datasets: a source of rows and a chain of transforms."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from mpistrat import absent, nest
from mpistrat.data import undistributed
from mpistrat.data.combine.access import Access
from mpistrat.data.combine.sequential import Sequential
from mpistrat.data.from_files import FromFiles
from mpistrat.data.options import AUTOTUNE, INFINITE_CARDINALITY, PREFETCH, UNKNOWN_CARDINALITY
from mpistrat.data.pipeline.optional import Element, Elements, NextAsOptional
from mpistrat.data.pipeline.prefetch import MakingLock, Prefetched
from mpistrat.data.rows.elements import as_array, lists_to_arrays
from mpistrat.data.sources.objects import (
    ArraySource,
    GeneratorSource,
    IterableSource,
    RangeSource,
    SequenceSource,
    signature_of,
)
from mpistrat.runtime.environment import rc

if TYPE_CHECKING:
    import numpy as np

    from mpistrat.data.options import Options
    from mpistrat.data.pipeline.transforms import Transform
    from mpistrat.data.rows.contracts import Source

_Rows = TypeVar("_Rows")


class _Explaining(type):
    """The type of a class whose errors say what to use in place of names of tf.data that it does not have."""

    if not TYPE_CHECKING:  # a type checker must find wrong names itself

        def __getattr__(cls, name: str) -> Any:
            return absent.of_object(cls, name, absent.OF_DATASET)


class Dataset(FromFiles, Access, Sequential, Generic[Element], metaclass=_Explaining):
    """Rows, or batches of rows, that can be read in any order.

    Make a dataset with `from_arrays`, `from_hdf5`, `from_sequence`, `from_iterable` or `range`. A transform
    returns a new dataset and does not change this one. Transforms may be chained in any order and mean what
    they mean in tf.data. Rows are read during iteration, and only those that are needed. On several replicas
    (``strategy.experimental_distribute_dataset``) each replica reads its own rows.

    Every iteration is a new epoch: the first ``for`` loop over this object is epoch 0, the next is epoch 1.
    A shuffled dataset has another order in each epoch. With a seed, the orders are the same in every run of
    the program.

    Examples
    --------
    >>> dataset = Dataset.from_arrays({"x": [1.0, 2.0, 3.0], "y": [0, 1, 0]})
    >>> for batch in dataset.map(lambda row: (row["x"] * 10, row["y"])).batch(2):
    ...     print(batch)
    (array([10., 20.]), array([0, 1]))
    (array([30.]), array([0]))
    """

    def __init__(
        self, source: Source | IterableSource, transforms: tuple[Transform, ...] = (), options: Options | None = None
    ):
        super().__init__(source, transforms, options)
        self.epochs = EpochCounter()
        self._making = MakingLock()

    if not TYPE_CHECKING:  # a type checker must find wrong names itself

        def __getattr__(self, name: str) -> Any:
            return absent.of_object(self, name, absent.OF_DATASET)

    # --- making one -----------------------------------------------------------------------

    @overload
    @classmethod
    def from_arrays(cls, tree: list[Any]) -> Dataset[np.ndarray]: ...
    @overload
    @classmethod
    def from_arrays(cls, tree: _Rows) -> Dataset[_Rows]: ...
    @classmethod
    def from_arrays(cls, tree: Any) -> Dataset[Any]:
        """Return a dataset of the rows of arrays.

        Parameters
        ----------
        tree : array or nested structure of arrays
            Tuples, dicts, namedtuples and dataclasses give an element its structure. A list is one array, as in
            tf.data. All arrays have the same length along axis 0, the axis of the samples.

        Raises
        ------
        ValueError
            If the lengths of the arrays differ, or an array is a scalar.

        Examples
        --------
        >>> [int(x) for x in Dataset.from_arrays([1, 2, 3])]
        [1, 2, 3]
        """
        return cls(ArraySource(tree))

    @overload
    @classmethod
    def from_tensor_slices(cls, tensors: list[Any]) -> Dataset[np.ndarray]: ...
    @overload
    @classmethod
    def from_tensor_slices(cls, tensors: _Rows) -> Dataset[_Rows]: ...
    @classmethod
    def from_tensor_slices(cls, tensors: Any) -> Dataset[Any]:
        """Return a dataset of the rows of arrays: the name that tf.data has for `from_arrays`.

        Parameters
        ----------
        tensors : array or nested structure of arrays
            As for `from_arrays`.
        """
        return cls.from_arrays(tensors)

    @classmethod
    def from_tensors(cls, tensors: Any) -> Dataset[Any]:
        """Return a dataset of one element.

        Parameters
        ----------
        tensors : array, number or nested structure of these
            The element. A list is one array.

        Examples
        --------
        >>> list(Dataset.from_tensors(([1, 2], 3)).repeat(2).batch(2))
        [(array([[1, 2],
               [1, 2]]), array([3, 3]))]
        """
        return cls(ArraySource(nest.map_structure(lambda leaf: as_array(leaf)[None], lists_to_arrays(tensors))))

    @classmethod
    def range(cls, start: int, stop: int | None = None, step: int = 1) -> Dataset[np.ndarray]:
        """Return a dataset of the integers of a range, as int64.

        Parameters
        ----------
        start, stop, step : int
            As for Python's ``range``. ``range(n)`` has the numbers from 0 to n - 1.

        Examples
        --------
        >>> list(Dataset.range(5).batch(3))
        [array([0, 1, 2]), array([3, 4])]
        """
        return cls(RangeSource(range(start) if stop is None else range(start, stop, step)))  # type: ignore[return-value]

    @classmethod
    def from_sequence(cls, sequence: Any) -> Dataset[Any]:
        """Return a dataset of the elements of any object with a length and an index.

        Such objects are map-style datasets of torch, lists of elements, memory maps, zarr arrays and h5py
        datasets. An array (an object with ``shape`` and ``dtype``) is read in runs of rows, or by ``oindex`` if
        it has that. Of other objects, ``__getitems__`` is called with all indices of a batch. Without
        ``__getitems__``, ``__getitem__`` is called with one index at a time.

        Parameters
        ----------
        sequence : array, or object with ``__len__`` and ``__getitem__``
            Equal indices must give equal elements, on every rank. Elements are arrays, numbers or nested
            structures of them, and all have the same shapes. A list is one array.

        Raises
        ------
        TypeError
            If the object is not an array, and has no ``__len__`` or no ``__getitem__``.
        ValueError
            If the object is empty.

        Examples
        --------
        >>> squares = [{"x": i, "y": i * i} for i in range(5)]
        >>> list(Dataset.from_sequence(squares).skip(1).batch(2))[0]
        {'x': array([1, 2]), 'y': array([1, 4])}
        """
        return cls(SequenceSource(sequence))

    @classmethod
    def from_iterable(cls, iterable: Iterable[Any] | Callable[[], Iterable[Any]]) -> IterableDataset[Any]:
        """Return a dataset of unknown length, of what an iterable yields.

        The dataset is read from its beginning only. When it is distributed, every replica goes through the
        whole iterable and keeps the rows of its own pieces. The iterable must yield the same on all replicas.
        At every step the replicas exchange a flag that tells whether any of them has rows. Under
        ``distribute_datasets_from_function`` every replica has its own iterable.

        Parameters
        ----------
        iterable : iterable, or callable that returns one
            A new iterator is made, or the callable is called, in every epoch. A generator yields its elements
            only once: pass the function that makes it.

        Examples
        --------
        >>> def lines():
        ...     yield from ([1, 2], [3, 4], [5, 6])
        >>> list(Dataset.from_iterable(lines).batch(2))
        [array([[1, 2],
               [3, 4]]), array([[5, 6]])]
        """
        return IterableDataset(IterableSource(iterable))

    @classmethod
    def from_generator(
        cls,
        generator: Callable[..., Iterable[Any]],
        output_types: Any = None,
        output_shapes: Any = None,
        args: tuple[Any, ...] = (),
        output_signature: Any = None,
    ) -> IterableDataset[Any]:
        """Return a dataset of what a generator function yields, as `from_iterable`.

        Parameters
        ----------
        generator : callable
            Called at the beginning of every epoch. Returns an iterable.
        output_types, output_shapes : structure of dtypes and of shapes, optional
            The former way to write ``output_signature``.
        args : tuple
            Arguments of the function.
        output_signature : structure of ArraySpec, optional
            Structure, shapes and dtypes of all elements. Numbers and lists get the dtype. By default the structure
            of the first element.

        Raises
        ------
        TypeError
            If ``generator`` is not callable. When elements are read, if one does not have the structure or dtype.
        ValueError
            When elements are read, if one does not have the shape.

        Examples
        --------
        >>> from mpistrat.data import ArraySpec
        >>> def counts(n):
        ...     yield from range(n)
        >>> list(Dataset.from_generator(counts, args=(3,), output_signature=ArraySpec((), "f4")).batch(2))
        [array([0., 1.], dtype=float32), array([2.], dtype=float32)]
        """
        signature = signature_of(output_types, output_shapes, output_signature)
        return IterableDataset(GeneratorSource(generator, tuple(args or ()), signature))

    # --- questions ------------------------------------------------------------------------

    @property
    def element_spec(self) -> Any:
        """Structure of an element, with an `ArraySpec` for each array.

        Examples
        --------
        >>> Dataset.from_arrays(([[1.0, 2.0]], [3])).batch(4).element_spec
        (ArraySpec(shape=(None, 2), dtype=float64), ArraySpec(shape=(None,), dtype=int64))
        """
        return self._plan.element_spec()

    def cardinality(self) -> int:
        """Return the number of elements.

        Returns
        -------
        int
            `INFINITE_CARDINALITY` (-1) for an endless dataset, `UNKNOWN_CARDINALITY` (-2) for a dataset made of
            an iterable.
        """
        return INFINITE_CARDINALITY if self._plan.length is None else self._plan.length

    def __len__(self) -> int:
        if self._plan.length is None:
            raise TypeError("an endless dataset has no length: use take(), or repeat() with a count")
        return self._plan.length

    def __iter__(self) -> NextAsOptional[Element]:
        elements = self._plan.elements(next(self.epochs))
        prefetch = self.options().prefetch
        if "data" in rc.debug:
            return Elements(undistributed.record_arrays(elements))
        if not prefetch:
            return Elements(elements)
        return Prefetched(elements, PREFETCH if prefetch == AUTOTUNE else prefetch, making=self._making)

    # --- inside the package ---------------------------------------------------------------

    @classmethod
    def _of(cls, source: Any, transforms: tuple[Transform, ...], options: Options) -> Any:
        return (IterableDataset if source.streamed else Dataset)(source, transforms, options)

    @cached_property
    def _plan(self) -> Any:
        return self._definition.ready().plan


class EpochCounter:
    """Count the iterations of a dataset: 0, 1, 2, ... A copy goes on from the same number.

    Not ``itertools.count``: Python 3.14 can neither copy nor pickle it, and so no dataset.
    """

    def __init__(self, first: int = 0):
        self._next, self._lock = first, threading.Lock()

    def __next__(self) -> int:
        with self._lock:  # two threads may begin to iterate at once
            epoch, self._next = self._next, self._next + 1
        return epoch

    def __reduce__(self) -> tuple[type[EpochCounter], tuple[int]]:
        return EpochCounter, (self._next,)


class IterableDataset(Dataset[Element]):
    """Rows, or batches of rows, of an iterable: read in order, and their number is unknown.

    Make it with `Dataset.from_iterable`. It has the transforms of `Dataset`. ``shuffle`` needs a
    ``buffer_size``: each run of that many rows is permuted. ``len`` raises.

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
        """Return `UNKNOWN_CARDINALITY` (-2)."""
        return UNKNOWN_CARDINALITY

    def __len__(self) -> int:
        raise TypeError("the length of a dataset that is made of an iterable is unknown before its end")
