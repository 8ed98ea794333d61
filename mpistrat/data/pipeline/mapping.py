"""Make elements of rows: the functions given to ``map``, and batches."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby, repeat
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from mpistrat import context, nest
from mpistrat.data.pipeline.transforms import Map, Transform, before_batch
from mpistrat.data.rows import elements, spec
from mpistrat.runtime.agreement import collective_lock

_ONLY_ARRAYS = {np.ndarray}
_dtype = attrgetter("dtype")


class MapAndBatch:
    """The functions and the batch of a pipeline. All batches have the dtypes of the first row.

    ``typed`` says whether the rows of the source have one dtype. ``first()`` returns a list of the first row. All
    replicas read the same one and call each function once more for it, so they agree without a message. Without
    ``first``, the first row of this replica counts.
    """

    def __init__(self, transforms: Sequence[Transform], typed: bool, first: Callable[[], list[Any]] | None = None):
        at = len(before_batch(transforms))
        self.batch: Any = transforms[at] if at < len(transforms) else None
        self.row_maps = [transform for transform in transforms[:at] if isinstance(transform, Map)]
        self.batch_maps = [transform.fn for transform in transforms[at:] if isinstance(transform, Map)]
        self.first, self._typed = first, typed
        self._dtypes: list[np.dtype] | None = None
        self._batch_dtypes: list[Any] | None = None

    def _first_mapped(self) -> list[Any]:
        return [] if self.first is None else mapped_rows(self.first(), self.row_maps)

    def stacked(self, rows: Sequence[Any]) -> Any:
        """Return mapped rows as one batch, before the functions for batches."""
        # Without functions, the rows of a typed source have its dtypes.
        if self._dtypes is None and (self.row_maps or not self._typed):
            first = (self._first_mapped() or rows)[0]
            self._dtypes = elements.dtypes_of(nest.map_structure(spec.of_array, first))
        return (elements if self.batch is None else self.batch).stack(rows, self._dtypes)

    def mapped(self, tree: Any) -> Any:
        """Return a batch after the functions for batches."""
        batch = elements.mapped_batch(tree, self.batch_maps)
        if not self.batch_maps:
            return batch
        if self._batch_dtypes is None:
            # The first row is repeated to the size of this batch: a function may take a fixed number of rows.
            same = self._first_mapped() * max(1, len(nest.flatten(tree)[0][0]))
            first = elements.mapped_batch(self.stacked(same), self.batch_maps) if same else batch
            self._batch_dtypes = elements.dtypes_of_batch(first)
        # Fast path: a tuple of arrays, without a function of Python (7 of them would take 1 us of 4).
        are_arrays = type(batch) is tuple and {*map(type, batch)} == _ONLY_ARRAYS
        if are_arrays and [*map(_dtype, batch)] == self._batch_dtypes:
            return batch
        return elements.batch_of_dtypes(batch, self._batch_dtypes)


def generators_of(fn: Any) -> list[str]:
    """Return the names of the random generators that a function captures, or that its object has."""
    from mpistrat.messages.pickling import captured  # a late import: takes 9 ms, and only several ranks call this

    inner = generators_of(fn.func) if isinstance(fn, partial) else []
    variables: dict[Any, Any] = {**fn.keywords, **dict(enumerate(fn.args))} if isinstance(fn, partial) else {}
    # functools.wraps hides the function that draws behind its decorator. A method draws from its object.
    fn = getattr(fn, "__wrapped__", fn)
    variables |= {**getattr(getattr(fn, "__self__", fn), "__dict__", {}), **dict(captured(fn))}
    kinds = (np.random.Generator, np.random.RandomState, random.Random)
    return inner + [str(name) for name, value in variables.items() if isinstance(value, kinds)]


class Numbered(NamedTuple):
    """A row with its number in the source, and its epoch: what a generator of ``map(fn, seed=...)`` depends on."""

    row: Any
    number: Any
    epoch: Any


class NumberedSource:
    """A source whose rows are `Numbered`. It has the other attributes of the source."""

    def __init__(self, source: Any):
        self._source = source
        self._flat = source.streamed or source.numbers(np.empty(0, np.int64), 0).ndim == 1

    def __getattr__(self, name: str) -> Any:
        if name == "_source":  # a copy has no attributes yet
            raise AttributeError(name)
        return getattr(self._source, name)

    def element_spec(self) -> Numbered:
        """Return the structure of a numbered row."""
        number = spec.ArraySpec((), np.int64)
        return Numbered(self._source.element_spec(), number, number)

    def numbers(self, ks: np.ndarray, iteration: int) -> np.ndarray:
        """Return the numbers by which `read` knows rows, with two more columns: their numbers, and their epoch."""
        numbers = self._source.numbers(ks, iteration)
        columns = numbers if numbers.ndim == 2 else numbers[:, np.newaxis]
        return np.column_stack([columns, self._source.numbers_of_all(ks), np.full(len(ks), iteration)])

    def read(self, rows: np.ndarray) -> Numbered:
        """Return rows, their numbers and their epochs, stacked on axis 0."""
        return Numbered(self._source.read(self._own(rows)), rows[:, -2], rows[:, -1])

    def read_list(self, rows: np.ndarray) -> list[Numbered]:
        """Return rows one by one."""
        return [*map(Numbered, self._source.read_list(self._own(rows)), rows[:, -2], rows[:, -1])]

    def _own(self, rows: np.ndarray) -> np.ndarray:
        return rows[:, 0] if self._flat else rows[:, :-2]

    def open(self, iteration: int) -> Iterator[Numbered]:
        """Return an iterator over the numbered rows of a stream."""
        return (Numbered(row, number, iteration) for number, row in enumerate(self._source.open(iteration)))

    def first(self) -> Numbered:
        """Return the first row of a stream."""
        return Numbered(self._source.first(), 0, 0)


def numbered(source: Any, transforms: Sequence[Transform]) -> Any:
    """Return the source with `Numbered` rows if a function needs generators, or a worker tells which row failed.

    Not for ``workers="auto"``: a quick function would take a tenth longer.
    """
    needed = (isinstance(step, Map) and (step.seed is not None or step.is_by_workers) for step in transforms)
    return NumberedSource(source) if any(needed) else source


def mapped_rows(rows: Iterable[Any], maps: Sequence[Map]) -> list[Any]:
    """Return rows after all functions, in order. Neighbours with the same number of calls are called row by row.

    A single row is not sent to a worker.
    """
    mapped = [*rows]
    row_ids: list[Any] = []
    if mapped and type(mapped[0]) is Numbered:
        row_ids = [(int(row.number), int(row.epoch)) for row in mapped]
        mapped = [row.row for row in mapped]
    for (calls, workers), same in groupby(maps, attrgetter("calls", "workers")):
        group = [*same]
        if workers is not None and len(mapped) > 1:
            mapped = workers.mapped(mapped, row_ids)
            continue
        functions: Iterable[Any] = repeat([step.fn for step in group])
        if row_ids:
            functions = [[elements.seeded(step.fn, step.seed, row_id) for step in group] for row_id in row_ids]
        if calls == 1 or len(mapped) < 2:
            mapped = [*map(elements.mapped, mapped, functions)]
        else:
            # The strategy of the caller is kept by thread, so threads of the pool must get it.
            call = partial(_in_thread, [*context.stack()])
            with ThreadPoolExecutor(min(calls, len(mapped)), "mpistrat-map") as pool:
                mapped = [*pool.map(call, functions, mapped)]
    return mapped


def _in_thread(modes: list[context.Mode], functions: Sequence[Any], row: Any) -> Any:
    """Return a row after some functions, with the strategy of the caller and without collectives."""
    stack = context.stack()
    before = stack[:]
    stack[:] = modes
    this = threading.get_ident()
    collective_lock.forbidden_threads.setdefault(this, collective_lock.MAKES_A_BATCH)
    try:
        return elements.mapped(row, functions)
    finally:
        collective_lock.forbidden_threads.pop(this, None)
        stack[:] = before
