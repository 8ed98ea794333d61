"""Plans of pipelines: read any element, or any rows of any batch, of any iteration; or an iterable in its order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpistrat import nest
from mpistrat.data.errors import explain_empty_parts
from mpistrat.data.options import MOST_PREFETCH
from mpistrat.data.pipeline.mapping import MapAndBatch, mapped_rows, numbered
from mpistrat.data.pipeline.transforms import Batch, BlocksShuffled, Map, Open, Order, Segment, Transform, before_batch
from mpistrat.data.rows import elements, spec
from mpistrat.data.rows.contracts import Source, StreamSource
from mpistrat.process.cache import Cache

_READ_AHEAD_BYTES = 1 << 20  # of single rows that one call reads
_READ_AHEAD_ROWS = 1024
ORDER_AHEAD_ROWS = 16384  # whose numbers are found in one call
_ORDER_AHEAD_STEPS = 256  # at most, however few rows a step has
_ITERATIONS_KEPT = 4  # several iterators may be in different epochs
_LEAST_SHARE = 1 / 8  # of each batch
_OPEN_AT_ONCE = 2  # iterations of an iterable that are read side by side; an older one begins again

# Maps the number of rows of a batch to the first of the wanted rows, and one past the last.
Cut: TypeAlias = "Callable[[int], tuple[int, int]]"


class Advice:
    """Announce the rows of a window and of the next to the source: once, or again where two iterations alternate."""

    def __init__(self, source: Source, windows: BlocksShuffled):
        self._source, self._windows = source, windows
        self._announced = (-1, 0, 0)

    def announce_after(self, iteration: int, k: int) -> None:
        """Announce the rows that follow element ``k`` of an iteration of the shuffle."""
        last_iteration, stop, announced = self._announced
        if last_iteration == iteration and k < stop:
            return
        if last_iteration == iteration and k < announced:
            # The window that begins was announced with the one before it.
            stop = announced
        else:
            # The first window of an epoch, or a jump: nothing is announced yet.
            stop, spans = self._windows.spans(k, iteration)
            self._source.advise(spans)
        announced = stop
        if stop < self._windows.length:
            announced, spans = self._windows.spans(stop, iteration)
            self._source.advise(spans)
        self._announced = (iteration, stop, announced)


class _Ahead(NamedTuple):
    """The rows of some batches, and the iteration and element of the first shuffle at which each batch ends."""

    cut: Cut | None
    first: int
    rows: list[np.ndarray]
    ends: list[tuple[int, int]]


class _Batches(NamedTuple):
    """The positions of the rows of some batches in an iteration, the part of each batch, and its last row."""

    positions: np.ndarray
    parts: list[slice]
    last: np.ndarray


class PipelinePlan:
    """A source with its transforms, ready to read. It may be a replica's part of the source ``whole``.

    An iteration has ``row_length`` rows, in ``length`` elements; None if it is endless.
    """

    def __init__(self, source: Source, transforms: Sequence[Transform], whole: Source | None = None):
        rows = before_batch(transforms)
        source, whole = numbered(source, rows), None if whole is None else numbered(whole, rows)
        self._source = source
        self._rows = Order(source.length, rows, source.blocks())
        # A function, not a method of this plan: a cycle would keep files open until a garbage collection.
        self._map_and_batch = MapAndBatch(transforms, True, None if whole is None else partial(_first_row, whole))
        self._row_maps = self._map_and_batch.row_maps
        self._no_mapped_rows: Any = None
        self._ahead = Cache[int, _Ahead](_ITERATIONS_KEPT)
        self._kept: tuple[tuple[bytes, Cut | None], _Batches] | None = None
        windows = self._rows.windows
        in_lanes = any(getattr(transform, "lanes", None) for transform in rows)
        # Lists that grow from one batch would read the files of the first window of lanes again.
        self._lists_grow = windows is None and (source.in_memory or not in_lanes)
        self._advice = None if windows is None or not source.announced() else Advice(source, windows)
        self.batch: Batch | None = self._map_and_batch.batch
        self.length = self.row_length = self._rows.length
        if self.batch is not None:
            self._batches = Order(self.batch.length(self.row_length), transforms[len(rows) + 1 :])
            self.length = self._batches.length
        self.maps = any(isinstance(transform, Map) for transform in transforms)

    def together(self, share: int) -> int:
        """Return how many batches of ``share`` rows each are best read together; 0 or 1 if none are."""
        if self.batch is None:
            return 1
        return self._source.rows_in_two_reads(share / self.batch.size) // share

    @property
    def in_memory(self) -> bool:
        """Whether the rows lie in memory."""
        return self._source.in_memory

    def rows(self, k: int, iteration: int, cut: Cut | None = None) -> np.ndarray:
        """Return the numbers of the source's rows that make element ``k``, or a cut of them. 256 are found at once."""
        ahead = self._ahead.get(iteration)
        if ahead is None or ahead.cut is not cut or not 0 <= k - ahead.first < len(ahead.rows):
            ahead = self._ahead.keep(iteration, self._look_ahead(k, iteration, cut))
        if self._advice is not None and ahead.ends:
            self._advice.announce_after(*ahead.ends[k - ahead.first])
        return ahead.rows[k - ahead.first]

    def read(self, rows: np.ndarray) -> Any:
        """Return the element that is made of these rows; without rows, an empty batch."""
        if self.batch is None:
            return self.read_list(rows)[0]
        if not len(rows):
            return self.empty()
        return self._map_and_batch.mapped(self._source.read(rows) if self._plain else self._stack(self.read_list(rows)))

    def read_list(self, rows: np.ndarray) -> list[Any]:
        """Return rows one by one, after the functions for single rows."""
        return mapped_rows(self._source.read_list(rows), self._row_maps)

    def read_rows(self, rows: np.ndarray) -> Any:
        """Return rows stacked on axis 0, after the functions for single rows."""
        if not self._row_maps:
            return self._source.read(rows)
        return self._stack(self.read_list(rows)) if len(rows) else self._empty_mapped_rows()

    def locate(self, ks: np.ndarray, iteration: int) -> np.ndarray:
        """Return the numbers of the source's rows that make the rows ``ks`` of an iteration."""
        rows: np.ndarray | None = None
        for positions, numbers, inner in self._rows.locate(ks, iteration):
            source_rows = self._source.numbers(numbers, inner)
            # A row of combined datasets has several numbers: only the source knows how many.
            if rows is None:
                rows = np.empty((len(ks), *source_rows.shape[1:]), np.int64)
            rows[positions] = source_rows
        return self._source.numbers(ks[:0], iteration) if rows is None else rows

    def read_each(self, parts: Sequence[np.ndarray]) -> Iterator[Any]:
        """Yield the batches that are made of these rows. All rows are read in one call."""
        if len(parts) > 1 and self.batch is not None:
            try:
                rows = np.concatenate(parts)
                tree = self._source.read(rows) if len(rows) else None
            except Exception:
                tree = None  # read batch by batch below, so that the error is raised at its batch
            if tree is not None:
                leaves, rebuild = nest.flatten(tree)
                del tree
                finished = self._map_and_batch.mapped if self._plain else self._of_stacked
                stop = 0
                for rows in parts:
                    start, stop = stop, stop + len(rows)
                    if start == stop:
                        yield self.read(rows)
                    else:
                        yield finished(rebuild([leaf[start:stop] for leaf in leaves]))
                return
        for rows in parts:
            yield self.read(rows)

    def lists(
        self, rows_of: Callable[[int], np.ndarray], first: int, stop: int | None, together: int, per_step: int = 1
    ) -> Iterator[list[Any]]:
        """Yield the batches of steps from ``first`` up to ``stop`` in lists. Up to ``together`` steps are read at once.

        A step has ``per_step`` batches, and ``rows_of(k)`` are the rows of batch ``k``. In order, a first list
        of one comes soon, and lists grow. In a shuffle they would read the same blocks again. An error is raised after
        the batches before it. Batches that functions of the program make come one by one: a function may turn small
        rows into large arrays.
        """
        size = 1 if self._lists_grow else together
        while stop is None or first < stop:
            last = first + size if stop is None else min(first + size, stop)
            batches = self.read_each([rows_of(k) for k in range(first * per_step, last * per_step)])
            if self.maps:
                for batch in batches:
                    yield [batch]
                    del batch
            else:
                yield from in_a_list(batches)
            first, size = last, min(2 * size, together)

    def element(self, k: int, iteration: int) -> Any:
        """Return element ``k``: a batch, or a single row if the dataset is not batched."""
        return self.read(self.rows(k, iteration))

    def element_if_any(self, k: int, iteration: int) -> Any:
        """Return element ``k``, or None after the last."""
        return None if self.length is not None and k >= self.length else self.element(k, iteration)

    def empty(self) -> Any:
        """Return a batch without rows."""
        explain_empty_parts()
        tree = spec.zeros(self._source.element_spec(), 0) if self._plain else self._empty_mapped_rows()
        try:
            return self._map_and_batch.mapped(tree)
        except Exception as error:
            if hasattr(error, "add_note"):
                error.add_note(
                    "map() was called with a batch of no rows, which a replica gets when a global batch has too "
                    "few rows for all replicas: the function must accept arrays of length 0"
                )
            raise

    def elements(self, iteration: int) -> Iterator[Any]:
        """Yield the elements of an iteration, one after another."""
        if self.batch is not None:
            # `together` counts the batches of two calls of the source.
            together = min(self.together(self.batch.size), MOST_PREFETCH) // 2
            for batches in self.lists(partial(self.rows, iteration=iteration), 0, self.length, max(1, together)):
                while batches:  # only the caller keeps a batch alive
                    yield batches.pop(0)
            return
        row_bytes = spec.row_bytes(self._source.element_spec())
        ahead = max(1, min(_READ_AHEAD_ROWS, _READ_AHEAD_BYTES // max(1, row_bytes)))
        at_once = max((transform.at_once for transform in self._row_maps), default=1)
        start = 0
        while self.length is None or start < self.length:
            stop = start + ahead if self.length is None else min(start + ahead, self.length)
            rows = self._source.read_list(self.locate(np.arange(start, stop), iteration))
            while rows:  # functions are called when their rows are requested
                yield from mapped_rows(rows[:at_once], self._row_maps)
                del rows[:at_once]
            start = stop

    def element_spec(self) -> Any:
        """Return the structure of an element. Functions of ``map`` are called on the first row of the source."""
        if self.batch is None:
            return self._row_spec()
        size = self.batch.size if self.batch.drop_remainder else None
        functions = self._map_and_batch.batch_maps
        if not functions:
            return self.batch.spec(self._row_spec(), size)
        # A dimension that is 1 for one row and 2 for two rows is the batch dimension.
        few, more = (
            nest.map_structure(spec.of_array, elements.mapped_batch(self._stack(rows), functions))
            for rows in (self._probe(), 2 * self._probe())
        )
        return nest.map_structure(lambda a, b: _common(a, b, size), few, more)

    def _row_spec(self) -> Any:
        if not self._row_maps:
            return self._source.element_spec()
        return nest.map_structure(spec.of_array, self._probe()[0])

    def _look_ahead(self, k: int, iteration: int, cut: Cut | None) -> _Ahead:
        size = 1 if self.batch is None else self.batch.size
        first, stop = (0, size) if cut is None else cut(size)
        wanted = stop - first
        steps = min(max(ORDER_AHEAD_ROWS // max(1, wanted), 1), _ORDER_AHEAD_STEPS)
        if self.length is not None:
            steps = min(steps, self.length - k)
        ks = np.arange(k, k + steps)
        segments: list[Segment] = [(slice(None), ks, iteration)]
        if self.batch is not None:
            segments = self._batches.locate(ks, iteration)
        # A replica that reads less than 1/8 of each batch gains nothing from read-ahead of whole windows.
        announced = self._advice is not None and wanted >= size * _LEAST_SHARE
        rows: list[Any] = [None] * steps
        ends: list[Any] = [None] * steps
        for positions, numbers, inner in segments:
            batches = self._batches_of(numbers, size, cut)
            located = self.locate(batches.positions, inner)
            steps_here = np.arange(steps)[positions]
            for step, part in zip(steps_here.tolist(), batches.parts, strict=True):
                rows[step] = located[part]
            if announced:
                # Level 1 ends at the output of the shuffle, in whose windows rows are announced.
                for part, shuffled, inner_iteration in self._rows.locate(batches.last, inner, level=1):
                    for step, number in zip(steps_here[part].tolist(), shuffled.tolist(), strict=True):
                        ends[step] = inner_iteration, number
        return _Ahead(cut, k, rows, ends if announced else [])

    def _batches_of(self, numbers: np.ndarray, size: int, cut: Cut | None) -> _Batches:
        """Return which rows of an iteration are in these batches. They are kept: each epoch asks for the same."""
        key = numbers.tobytes(), cut
        cached = self._kept
        if cached is None or cached[0] != key:
            starts = numbers * size
            stops = starts + size
            if self._rows.length is not None:
                stops = np.minimum(stops, self._rows.length)
            if cut is not None:
                counts = (stops - starts).tolist()
                cuts = {n: cut(n) for n in set(counts)}  # nearly all batches have the same number of rows
                pieces = np.array([cuts[n] for n in counts])
                starts, stops = starts + pieces[:, 0], starts + pieces[:, 1]
            sizes = stops - starts
            ends = sizes.cumsum()
            positions = np.arange(sizes.sum()) + np.repeat(starts - ends + sizes, sizes)
            parts = [*map(slice, (ends - sizes).tolist(), ends.tolist())]
            self._kept = cached = key, _Batches(positions, parts, np.maximum(stops - 1, 0))
        return cached[1]

    @property
    def _plain(self) -> bool:
        """Whether a batch is the arrays that the source reads."""
        return not self._row_maps and (self.batch is None or self.batch.stacks_arrays)

    def _of_stacked(self, tree: Any) -> Any:
        """Return the batch of rows that the source stacked, where it is not `_plain`."""
        return self._map_and_batch.mapped(self._stack(mapped_rows(elements.rows_of(tree), self._row_maps)))

    def _stack(self, rows: list[Any]) -> Any:
        tree = self._map_and_batch.stacked(rows)
        if self._no_mapped_rows is None:
            # A copy: an empty view would keep the whole batch alive.
            self._no_mapped_rows = nest.map_structure(lambda x: x[:0].copy(), tree)
        return tree

    def _probe(self) -> list[Any]:
        return mapped_rows(_first_row(self._source), self._row_maps)

    def _empty_mapped_rows(self) -> Any:
        if self._no_mapped_rows is None:
            self._stack(self._probe())
        return nest.map_structure(np.copy, self._no_mapped_rows)


def _first_row(source: Source) -> list[Any]:
    """Return the first row in a list, or a row of zeros without rows."""
    if source.length == 0:
        return [*elements.rows_of(spec.zeros(source.element_spec(), 1))]
    return source.read_list(source.numbers(np.zeros(1, np.int64), 0))


def in_a_list(batches: Iterator[Any]) -> Iterator[list[Any]]:
    """Yield all batches in one list. An error is raised after those before it."""
    ready: list[Any] = []
    error = None
    try:
        for batch in batches:
            ready.append(batch)
            del batch  # after the yield, this frame would keep the last batch alive
    except Exception as raised:
        error = raised
    if ready:
        yield ready
    del ready
    if error is not None:
        try:
            raise error
        finally:
            error = None  # breaks the reference cycle of the frame and its error


def _common(few: spec.ArraySpec, more: spec.ArraySpec, size: int | None) -> spec.ArraySpec:
    if len(few.shape) != len(more.shape):
        raise ValueError(
            "the function given to map() returns arrays with different numbers of dimensions: shape "
            f"{few.shape} of one row and {more.shape} of two"
        )
    shape = [a if a == b else None for a, b in zip(few.shape, more.shape, strict=True)]
    if shape and shape[0] is None and (few.shape[0], more.shape[0]) == (1, 2):
        shape[0] = size
    return spec.ArraySpec(shape, few.dtype)


# --- iterables, which can be read from their beginning only ----------------------------------------------


class StreamPlan:
    """An iterable with its transforms, ready to read. Elements must be requested in ascending order.

    If replicas share the iterable, each calls the functions for the first row, too, and all rows get its dtypes.
    """

    length = row_length = None

    def __init__(self, source: StreamSource, transforms: Sequence[Transform], shared: bool = False):
        self._source, self._transforms = numbered(source, transforms), transforms
        self._map_and_batch = MapAndBatch(transforms, typed=False)
        self.batch, self._row_maps = self._map_and_batch.batch, self._map_and_batch.row_maps
        self._open = Cache[int, _Pass](_OPEN_AT_ONCE)
        self._empty: Any = None
        self._shared = shared

    def rows(self, k: int, iteration: int, cut: Cut | None = None) -> list[Any] | None:
        """Return the rows of element ``k`` before ``map``, or a cut of them; None after the last."""
        reading = self._open.get(iteration)
        # A stream cannot go back: it begins again, and elements before `k` are read and dropped.
        if reading is None or reading.number > k:
            reading = self._open.keep(iteration, _Pass(self._streamed(iteration)))
        rows = reading.element(k)
        return rows if rows is None or cut is None else rows[slice(*cut(len(rows)))]

    def read(self, rows: list[Any]) -> Any:
        """Return the element that is made of these rows; without rows, an empty batch."""
        if self.batch is None:
            return mapped_rows(rows, self._row_maps)[0]
        if not rows:
            return self.empty()
        batch = self._map_and_batch.mapped(self._map_and_batch.stacked(mapped_rows(rows, self._row_maps)))
        if self._empty is None:
            self._empty = spec.no_rows_of(nest.map_structure(spec.of_array, batch))
        return batch

    def element_if_any(self, k: int, iteration: int) -> Any:
        """Return element ``k``, or None after the last."""
        rows = self.rows(k, iteration)
        return None if rows is None else self.read(rows)

    def empty(self) -> Any:
        """Return a batch without rows, with the shapes of the first batch that was read."""
        explain_empty_parts()
        if self._empty is None:
            self.read([self._source.first()])  # keeps the shapes
        return nest.map_structure(np.copy, self._empty)

    def elements(self, iteration: int) -> Iterator[Any]:
        """Return an iterator over the elements of an iteration."""
        return map(self.read, self._streamed(iteration))

    def element_spec(self) -> Any:
        """Return the structure of an element, found by reading the first row if the source does not know it."""
        if self._map_and_batch.batch_maps:
            return spec.any_size(nest.map_structure(spec.of_array, self.read([self._source.first()])))
        row = self._source.element_spec()
        if self._row_maps:
            row = nest.map_structure(spec.of_array, mapped_rows([self._source.first()], self._row_maps)[0])
        return row if self.batch is None else self.batch.spec(row, None)

    def _streamed(self, iteration: int) -> Iterator[list[Any]]:
        open_stream: Open = self._opened
        for transform in self._transforms:
            open_stream = partial(transform.streamed, open_stream)
        whole = open_stream(iteration)
        return whole if self.batch is not None else ([row] for row in whole)

    def _opened(self, iteration: int) -> Iterator[Any]:
        stream = self._source.open(iteration)
        if self._shared and self._map_and_batch.first is None:
            for row in stream:
                # A copy, as functions may write to the row. All replicas take its dtypes.
                self._map_and_batch.first = lambda row=row: [elements.copied(row)]
                return itertools.chain([row], stream)
        return stream


class _Pass:
    def __init__(self, stream: Iterator[Any]):
        self._stream = stream
        self._element: Any = None
        self.number = -1

    def element(self, k: int) -> Any:
        while self.number < k:
            self._element = next(self._stream, None)  # None also when asked again after the last
            self.number += 1
        return self._element
