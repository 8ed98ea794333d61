"""Methods of a dataset whose elements are made one after another, so that their number is unknown."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mpistrat import nest
from mpistrat.data.combine.combined import DatasetPart
from mpistrat.data.combine.methods import Combining, part_of_rows
from mpistrat.data.combine.streamed import Openers, is_true
from mpistrat.data.pipeline.transforms import Batch, Open, PaddedBatch, integer
from mpistrat.data.rows import elements

if TYPE_CHECKING:
    from typing_extensions import Self

    from mpistrat.data.dataset import Dataset

_CYCLE = 16  # for any number of cores, on which the order must not depend
_ELEMENTS_OF_ONE = 32  # bits of the number of an element


class Sequential(Combining):
    """A combination of datasets that can be read in order."""

    def unbatch(self) -> Self:
        """Take batches apart: each row along axis 0 becomes an element.

        The length stays known where `batch` is the last transform, and is unknown otherwise.

        Raises
        ------
        ValueError
            When elements are read, if the arrays of one differ in length or are scalars.

        Examples
        --------
        >>> from mpistrat.data import Dataset
        >>> rows = Dataset.from_arrays([[1, 2], [3, 4]])
        >>> [int(x) for x in rows.unbatch()]
        [1, 2, 3, 4]
        """
        definition = self._definition
        last = definition.transforms[-1] if definition.transforms else None
        # Not a subclass: rows of padded batches keep the padding. Nor where rows were dropped.
        if type(last) is Batch and not last.drop_remainder:
            return type(self)(definition.source, definition.transforms[:-1], definition.options)
        return self._in_order("unbatch", lambda openers, _: (row for batch in openers[0]() for row in _unstack(batch)))

    def flat_map(self, map_func: Callable[..., Any]) -> Dataset[Any]:
        """Append the elements of the datasets that a function returns.

        The number of elements is unknown then. If the dataset is distributed, every replica reads all elements and
        calls the function for each, as for `from_iterable`. So do the methods that follow.

        Parameters
        ----------
        map_func : callable
            Called with an element. The parts of a tuple are separate arguments. Returns a Dataset, the same on all
            replicas: a shuffle needs a seed.

        Examples
        --------
        >>> from mpistrat.data import Dataset
        >>> [int(x) for x in Dataset.range(1, 4).flat_map(Dataset.range)]
        [0, 0, 1, 0, 1, 2]
        """
        return self._in_turn("flat_map", map_func, 1, 1)

    def interleave(
        self,
        map_func: Callable[..., Any],
        cycle_length: int | None = None,
        block_length: int = 1,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset[Any]:
        """Take elements in turn of the datasets that a function returns.

        Parameters
        ----------
        map_func : callable
            As for `flat_map`.
        cycle_length : int, optional
            Number of datasets that are read side by side, by default 16 on any machine.
        block_length : int
            Number of elements that a dataset gives in its turn.
        num_parallel_calls, deterministic
            Accepted for programs written for tf.data. Elements are made in order.

        Examples
        --------
        >>> from mpistrat.data import Dataset
        >>> [int(x) for x in Dataset.range(0, 30, 10).interleave(lambda x: Dataset.range(x, x + 2), cycle_length=2)]
        [0, 10, 1, 11, 20, 21]
        """
        cycle = _CYCLE if cycle_length in (None, -1) else integer(cycle_length, "the cycle_length of interleave()", 1)
        block = integer(block_length, "the block_length of interleave()", 1)
        return self._in_turn("interleave", map_func, cycle, block)

    def _in_turn(self, name: str, fn: Callable[..., Any], *turns: int) -> Any:
        if not callable(fn):
            raise TypeError(f"{name}() needs a function, not {fn!r}")
        make = functools.partial(_elements_of, fn, name)
        return self._in_order(f"{name}{turns}", lambda openers, epoch: _interleaved(openers, epoch, make, *turns))

    def scan(self, initial_state: Any, scan_func: Callable[[Any, Any], tuple[Any, Any]]) -> Dataset[Any]:
        """Apply a function that has a state.

        Parameters
        ----------
        initial_state : object
            The state before the first element of each epoch.
        scan_func : callable
            Called with the state and an element. Returns the next state and the new element.

        Examples
        --------
        >>> from mpistrat.data import Dataset
        >>> [int(x) for x in Dataset.range(5).scan(0, lambda total, x: (total + x, total + x))]
        [0, 1, 3, 6, 10]
        """

        def scanned(openers: Openers, _: int) -> Iterator[Any]:
            state = initial_state
            for element in openers[0]():
                state, result = scan_func(state, element)
                yield elements.of_arrays(result)

        return self._in_order("scan", scanned)

    def take_while(self, predicate: Callable[..., Any]) -> Self:
        """Keep the elements before the first for which a function is false.

        Parameters
        ----------
        predicate : callable
            As for `filter`.

        Examples
        --------
        >>> from mpistrat.data import Dataset
        >>> [int(x) for x in Dataset.range(9).take_while(lambda x: x < 3)]
        [0, 1, 2]
        """

        def true(element: Any) -> bool:
            return is_true(elements.call(predicate, element), "take_while")

        return self._in_order("take_while", lambda openers, _: itertools.takewhile(true, openers[0]()))

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Fold all elements of an epoch into a state.

        Parameters
        ----------
        initial_state : object
            The state before the first element.
        reduce_func : callable
            Called with the state and an element. Returns the next state.

        Returns
        -------
        object
            The last state.

        Examples
        --------
        >>> from mpistrat.data import Dataset
        >>> int(Dataset.range(5).reduce(0, lambda total, x: total + x))
        10
        """
        return functools.reduce(reduce_func, self, initial_state)  # type: ignore[call-overload]

    def bucket_by_sequence_length(
        self,
        element_length_func: Callable[..., int],
        bucket_boundaries: Sequence[int],
        bucket_batch_sizes: Sequence[int],
        padded_shapes: Any = None,
        padding_values: Any = None,
        pad_to_bucket_boundary: bool = False,
        no_padding: bool = False,
        drop_remainder: bool = False,
    ) -> Dataset[Any]:
        """Make padded batches of rows of similar lengths. The dataset can be distributed as after `batch`.

        Parameters
        ----------
        element_length_func : callable
            Returns the length of a row.
        bucket_boundaries : sequence of int
            The length from which on a row belongs to the next bucket. There is one more bucket than boundaries.
        bucket_batch_sizes : sequence of int
            Number of rows of a batch of each bucket, of all replicas together.
        padded_shapes, padding_values
            As for `padded_batch`.
        pad_to_bucket_boundary : bool
            Whether unknown dimensions are padded to the longest that fits the bucket, not to the longest of the batch.
        no_padding : bool
            Whether rows are stacked as they are.
        drop_remainder : bool
            Whether to leave out batches at the end that have fewer rows.

        Raises
        ------
        ValueError
            If sizes and boundaries do not fit. When rows are read, if one is too long for ``pad_to_bucket_boundary``.

        Examples
        --------
        >>> import numpy as np
        >>> from mpistrat.data import Dataset
        >>> rows = Dataset.from_arrays([1, 5, 2, 1, 6]).map(lambda n: np.full(n, n))
        >>> [batch.tolist() for batch in rows.bucket_by_sequence_length(len, [3], [2, 2])]
        [[[1, 0], [2, 2]], [[5, 5, 5, 5, 5, 0], [6, 6, 6, 6, 6, 6]], [[1]]]
        """
        bounds = tuple(integer(bound, "a boundary", 0) for bound in bucket_boundaries)
        sizes = tuple(integer(size, "the batch size of a bucket", 1) for size in bucket_batch_sizes)
        if len(sizes) != len(bounds) + 1 or sorted({*bounds}) != [*bounds]:
            raise ValueError(
                f"there must be ascending boundaries, and one more batch size, but there are the boundaries "
                f"{[*bounds]} and the batch sizes {[*sizes]}"
            )
        rows = self._in_order("bucket_by_sequence_length", lambda openers, _: openers[0](), rows=True)
        fill = (*bounds, None) if pad_to_bucket_boundary else None
        return rows._then(
            Buckets(
                max(sizes), bool(drop_remainder), padded_shapes, padding_values,
                element_length_func, bounds, sizes, fill, bool(no_padding),
            )
        )  # fmt: skip

    bucket_by_length = bucket_by_sequence_length

    def pack(self, tokens: int, drop_remainder: bool = True) -> Dataset[Any]:
        """Join arrays of any lengths, and cut them into rows of one length, as for language models.

        Parameters
        ----------
        tokens : int
            Length of a row along axis 0.
        drop_remainder : bool
            Whether to leave out a last row that is shorter.

        Examples
        --------
        >>> import numpy as np
        >>> from mpistrat.data import Dataset
        >>> rows = Dataset.range(1, 5).map(lambda n: np.full(n, n))
        >>> [row.tolist() for row in rows.pack(4)]
        [[1, 2, 2, 3], [3, 3, 4, 4]]
        """
        tokens = integer(tokens, "the tokens of pack()", 1)
        drop = bool(drop_remainder)
        return self._in_order(f"pack({tokens}, {drop})", lambda openers, _: _packed(openers[0](), tokens, drop))

    def _in_order(self, name: str, combine: Any, rows: bool = False) -> Any:
        definition = self._definition
        part = part_of_rows(definition, name) if rows else DatasetPart(definition.source, definition.transforms)
        return self._by_function(name, part, combine)


def _elements_of(fn: Callable[..., Any], name: str, element: Any, iteration: int) -> Iterator[Any]:
    """Return the elements of the dataset that a function returns. They depend on the iteration, not on earlier ones."""
    dataset = elements.call(fn, element)
    if not isinstance(dataset, Combining):
        raise TypeError(f"the function of {name}() must return a Dataset, not {type(dataset).__name__}")
    if any(not seed.given for seed in dataset.definition.seeds()):
        raise ValueError(f"the dataset that the function of {name}() returned needs a seed: {dataset}")
    elements_of_dataset: Iterator[Any] = dataset.definition.ready().plan.elements(iteration)
    return elements_of_dataset


def _interleaved(openers: Openers, iteration: int, make: Callable[..., Any], cycle: int, block: int) -> Iterator[Any]:
    """Yield elements as tf.data's interleave does: the next dataset begins when the turn of an ended one comes."""
    # The number of an element is the iteration of its dataset, so shuffles in it differ by element and epoch.
    source = enumerate(openers[0](), iteration << _ELEMENTS_OF_ONE)
    reading: list[Iterator[Any] | None] = [None] * cycle
    at = 0
    more = True
    while more or any(stream is not None for stream in reading):
        current = reading[at]
        if current is None and more:
            number, element = next(source, (0, None))
            more = element is not None
            if more:
                reading[at] = make(element, number)  # gives its first elements in this turn
                continue
        elif current is not None:
            taken = 0
            for taken, row in enumerate(itertools.islice(current, block), 1):  # noqa: B007
                yield row
            if taken < block:
                reading[at] = None
        at = (at + 1) % cycle


def _unstack(element: Any) -> Iterator[Any]:
    """Yield the rows of a batch."""
    _check_length("unbatch", nest.flatten(element)[0])
    return elements.rows_of(element)


def _check_length(name: str, leaves: Sequence[Any]) -> None:
    """Raise ValueError unless all arrays of an element have one length."""
    lengths = {np.shape(leaf)[:1] for leaf in leaves}
    if len(lengths) != 1 or () in lengths:  # a scalar has no length
        shapes = [np.shape(leaf) for leaf in leaves]
        raise ValueError(f"{name}() needs arrays of one length along axis 0, but an element has the shapes {shapes}")


def _packed(stream: Iterator[Any], tokens: int, drop: bool) -> Iterator[Any]:
    """Yield rows of ``tokens`` tokens."""
    held: list[list[Any]] = []
    count, rebuild = 0, None
    for element in stream:
        leaves, rebuild = nest.flatten(element)
        _check_length("pack", leaves)
        held = held or [[] for _ in leaves]
        for parts, leaf in zip(held, leaves, strict=True):
            parts.append(leaf)
        count += len(leaves[0])
        if count >= tokens:
            columns = [np.concatenate(parts) for parts in held]
            whole = count - count % tokens
            for first in range(0, whole, tokens):
                # A view would keep all joined rows alive.
                yield rebuild([column[first : first + tokens].copy() for column in columns])
            held = [[column[whole:]] for column in columns]
            count -= whole
    if count and not drop and rebuild is not None:
        yield rebuild([np.concatenate(parts) for parts in held])


@dataclass(frozen=True)
class Buckets(PaddedBatch):
    """The transform that stacks elements of similar lengths, as `Sequential.bucket_by_sequence_length`."""

    consecutive: ClassVar[bool] = False

    length_of: Callable[..., int] = len
    bounds: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    fill: tuple[int | None, ...] | None = None
    no_padding: bool = False

    def streamed(self, open_input: Open, iteration: int) -> Iterator[Any]:
        waiting: list[list[Any]] = [[] for _ in self.sizes]
        for row in open_input(iteration):
            bucket = self._bucket(row)
            if self.fill is not None and self.fill[bucket] is None:
                raise ValueError(
                    f"an element is {elements.call(self.length_of, row)} long, but pad_to_bucket_boundary=True needs "
                    f"less than {max(self.bounds, default=0)}: give a larger boundary"
                )
            waiting[bucket].append(row)
            if len(waiting[bucket]) == self.sizes[bucket]:
                yield waiting[bucket]
                waiting[bucket] = []
        if not self.drop_remainder:
            yield from (rows for rows in waiting if rows)

    def _bucket(self, row: Any) -> int:
        return int(np.searchsorted(self.bounds, elements.call(self.length_of, row), side="right"))

    def stack(self, rows: Sequence[Any], dtypes: Sequence[np.dtype] | None = None) -> Any:
        return elements.stack(rows, dtypes) if self.no_padding else super().stack(rows, dtypes)

    def shapes_of(self, row: Any, leaves: Sequence[Any]) -> list[Any]:
        shapes = super().shapes_of(row, leaves)
        longest = None if self.fill is None else self.fill[self._bucket(row)]
        if longest is None:
            return shapes
        if self.shapes is None and len(leaves) > 1:
            raise ValueError("pad_to_bucket_boundary=True needs padded_shapes for elements of several arrays")
        shapes = [
            (None, *np.shape(leaf)[1:]) if shape is None else shape for shape, leaf in zip(shapes, leaves, strict=True)
        ]
        # A row as long as the boundary belongs to the next bucket.
        return [tuple(longest - 1 if size in (None, -1) else size for size in shape) for shape in shapes]

    def __str__(self) -> str:
        return f"bucket_by_sequence_length({[*self.bounds]}, {[*self.sizes]})"

    def without_numbers(self) -> str:
        return str(self)
