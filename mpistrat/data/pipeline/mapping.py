"""Making elements of rows: the functions given to ``map``, and batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np

from mpistrat import context, nest
from mpistrat.data.pipeline.transforms import Map, Transform, before_batch
from mpistrat.data.rows import elements, spec
from mpistrat.runtime.agreement import threads

_ONLY_ARRAYS = {np.ndarray}
_dtype = attrgetter("dtype")


class Making:
    """The functions and the batch of a pipeline. All batches have the dtypes of the first row.

    ``typed`` says whether the rows of the source have one dtype. ``first()`` returns a list of the first row that all
    replicas share, which each of them finds alone by one more call of each function. Without it, the first row that is
    made counts. A method of a plan would keep the plan's files open until a garbage collection.
    """

    def __init__(self, transforms: Sequence[Transform], typed: bool, first: Callable[[], list[Any]] | None = None):
        at = len(before_batch(transforms))
        self.batch: Any = transforms[at] if at < len(transforms) else None
        self.row_maps = [each for each in transforms[:at] if isinstance(each, Map)]
        self.batch_maps = [each.fn for each in transforms[at:] if isinstance(each, Map)]
        self.first, self._typed = first, typed
        self._dtypes: list[np.dtype] | None = None
        self._batch_dtypes: list[Any] | None = None

    def _first_mapped(self) -> list[Any]:
        return [] if self.first is None else mapped_rows(self.first(), self.row_maps)

    def stacked(self, rows: Sequence[Any]) -> Any:
        """Return rows that are mapped as one batch, not mapped."""
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
            # Of as many rows: a function may take a fixed number of them.
            same = self._first_mapped() * max(1, len(nest.flatten(tree)[0][0]))
            first = elements.mapped_batch(self.stacked(same), self.batch_maps) if same else batch
            self._batch_dtypes = elements.dtypes_of_batch(first)
        # Fast path: a tuple of arrays, without a function of Python (7 of them would take 1 us of 4).
        are_arrays = type(batch) is tuple and {*map(type, batch)} == _ONLY_ARRAYS
        if are_arrays and [*map(_dtype, batch)] == self._batch_dtypes:
            return batch
        return elements.batch_of_dtypes(batch, self._batch_dtypes)


def mapped_rows(rows: Iterable[Any], maps: Sequence[Map]) -> list[Any]:
    """Return rows after all functions, in order. Neighbours with the same number of calls are called row by row."""
    found = [*rows]
    for calls, same in groupby(maps, lambda each: each.calls):
        functions = [each.fn for each in same]
        if calls == 1 or len(found) < 2:
            found = [elements.mapped(row, functions) for row in found]
        else:
            call = partial(_in_thread, [*context.stack()], functions)
            with ThreadPoolExecutor(min(calls, len(found)), "mpistrat-map") as pool:
                found = [*pool.map(call, found)]
    return found


def _in_thread(modes: list[context.Mode], functions: Sequence[Any], row: Any) -> Any:
    """Return a row after some functions, with the strategy of the caller and without collectives."""
    mine = context.stack()
    before = mine[:]
    mine[:] = modes
    this = threading.get_ident()
    threads.without.setdefault(this, threads.MAKES_A_BATCH)
    try:
        return elements.mapped(row, functions)
    finally:
        threads.without.pop(this, None)
        mine[:] = before
