"""Sources of rows that are kept in memory, or in a folder, after they were made once."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import nest
from mpistrat.data.combine.combined import CombinedSource, DatasetPart
from mpistrat.data.errors import naming_damage
from mpistrat.data.pipeline.chosen import ColumnFilter
from mpistrat.data.pipeline.prefetch import MakingLock
from mpistrat.data.pipeline.transforms import Batch, Map
from mpistrat.data.rows import spec
from mpistrat.data.rows.blocks import Blocks
from mpistrat.data.rows.contracts import ranks_of_node
from mpistrat.data.rows.lanes import piece
from mpistrat.process.files import replace_text
from mpistrat.runtime.topology import Topology
from mpistrat.storage.write import writers

if TYPE_CHECKING:
    from typing_extensions import Self

    from mpistrat.data.sources.files import FileSource

_VERSION = 1
_RECORD = "cache.json"
_COMPARED = ("version", "pipeline", "functions", "rows", "checksum")
_COMPARED_ROWS = 8  # made again and compared: they show changes that no digest sees
_STREAMED_ROWS = 1024  # of a stream, in one write


class CachedSource(CombinedSource):
    """The rows of the first iteration of a dataset. This process keeps those that it has read."""

    name = "cache"

    def __init__(self, parts: Sequence[DatasetPart]):
        super().__init__(parts)
        (self._part,) = parts
        self._lock = MakingLock()  # datasets made of this one may be read ahead at the same time
        self._held: np.ndarray | None = None
        self._columns: list[_Column] = []
        self._rebuild: Any = None

    @property
    def length(self) -> int | None:
        return self._part.length

    def element_spec(self) -> Any:
        """Return the structure of the first row, which is kept."""
        if not self.length:
            return self._part.plan.element_spec()
        return nest.map_structure(spec.of_array, self.read_list(np.zeros(1, np.int64))[0])

    def read(self, rows: np.ndarray) -> Any:
        with self._lock:
            self._make(rows)
            if all(column.alike for column in self._columns):
                return self._rebuild([column.values.take(rows, 0) for column in self._columns])
        return super().read(rows)

    def read_list(self, rows: np.ndarray) -> list[Any]:
        with self._lock:
            self._make(rows)
            columns = [column.values.take(rows, 0) for column in self._columns]
            # Copies: the caller may write to them, and a view would keep all rows of this call alive.
            return [
                self._rebuild([leaf.copy() if hasattr(leaf, "copy") else leaf for leaf in row])
                for row in zip(*columns, strict=True)
            ]

    def blocks(self) -> Blocks | None:
        return self._part.blocks()

    def __getstate__(self) -> dict[str, Any]:
        # A copy, or another process, makes the rows again: they may be large.
        return {**self.__dict__, "_held": None, "_columns": [], "_rebuild": None}

    def _make(self, rows: np.ndarray) -> None:
        """Make the rows that are not kept yet."""
        if self._held is None:
            self._held = np.zeros(len(self), bool)
        missing = np.unique(rows[~self._held[rows]])
        if not len(missing):
            return
        numbers = self._part.numbers(missing, 0)
        elements = self._part.plan.read_list(self._part.of_numbers(numbers))
        leaves, self._rebuild = nest.flatten(elements[0])
        columns = self._columns or [_Column(len(self._held)) for _ in leaves]
        for number, column in enumerate(columns):
            column.keep(missing, self._held, [nest.flatten(row)[0][number] for row in elements])
        self._columns = columns
        self._held[missing] = True


class _Column:
    """The values of one leaf for all rows: one array, or an array of arrays if their shapes or dtypes differ."""

    def __init__(self, rows: int):
        self._rows = rows
        self.values: Any = None
        self.alike = True

    def keep(self, rows: np.ndarray, held: np.ndarray, leaves: list[Any]) -> None:
        """Keep the values of some rows. ``held`` says which rows are kept already."""
        layouts = {(np.shape(leaf), np.asarray(leaf).dtype) for leaf in leaves}
        if self.values is not None:
            layouts.add((self.values.shape[1:], self.values.dtype) if self.alike else ((), np.dtype("O")))
        if self.alike and len(layouts) > 1:
            before, self.alike = self.values, False
            self.values = np.empty(self._rows, object)
            for row in np.flatnonzero(held).tolist():
                self.values[row] = before[row]
        if not self.alike:
            for row, leaf in zip(rows.tolist(), leaves, strict=True):
                self.values[row] = leaf
            return
        if self.values is None:
            ((shape, dtype),) = layouts
            self.values = np.empty((self._rows, *shape), dtype)
        self.values[rows] = leaves


class CachedInFolder(CombinedSource):
    """The rows of a dataset, which are written to a folder once and read by their numbers.

    All ranks write them in `agree`. A process that uses the rows without other ranks writes them by itself.
    """

    name = "cache"

    def __init__(self, parts: Sequence[DatasetPart], folder: Path, opened: FileSource | None = None):
        super().__init__(parts)
        (self._part,) = parts
        self._folder, self._opened, self._lock = folder, opened, MakingLock()

    def of_parts(self, parts: Sequence[DatasetPart]) -> Self:
        return type(self)(parts, self._folder, self._opened)

    @property
    def length(self) -> int | None:
        return len(self._rows()) if self._part.streamed else self._part.length

    def element_spec(self) -> Any:
        return self._rows().element_spec()

    def read(self, rows: np.ndarray) -> Any:
        return self._rows().read(rows)

    def blocks(self) -> Blocks | None:
        return self._rows().blocks()

    def fingerprint(self) -> Any:
        return f"{super().fingerprint()} in {str(self._folder)!r}"

    def agree(self, ranks: Topology) -> None:
        super().agree(ranks)
        # Each rank has drawn seeds of its own: all take the order of rank 0.
        part = self._part.with_drawn(ranks.broadcast_object(self._part.seeds()))
        # Who only reads needs no right to write.
        written = ranks.all_true((self._folder / _RECORD).exists())
        shared = not written and len(writers(ranks, self._folder)) == ranks.size
        # A folder that other nodes do not see: each node writes all rows.
        together = ranks if shared else Topology.of(ranks.node)

        def identity() -> dict[str, Any]:
            self._opened = _opened(part, self._folder, together)
            return self._opened.identity()

        if len({*map(str, ranks.on_all_ranks(identity))}) > 1:  # another node may refuse its folder
            raise ValueError(f"{self._folder} has another order on each node, of seeds that were drawn; fix: remove it")

    def ready(self, memory: int, sharing: int | None = None, ranks: Topology | None = None) -> Any:
        """Return the source of the rows in the folder."""
        return self._rows().ready(memory, sharing, ranks)

    def _rows(self) -> FileSource:
        with self._lock:
            if self._opened is None:
                self._opened = _opened(self._part, self._folder, None)
        return self._opened


def _opened(part: DatasetPart, folder: Path, ranks: Topology | None) -> FileSource:
    """Return the rows of a dataset in a folder, which are written first if they are not there. Collective."""
    from mpistrat.data.formats.hdf5 import Hdf5
    from mpistrat.data.sources.files import FileSource

    find = partial(_find_record, folder, part)
    file, record, seeds = find() if ranks is None else ranks.on_first(find)
    like: Any = None

    def describe() -> None:
        nonlocal like
        like = part.plan.element_spec()

    describe() if ranks is None else ranks.on_all_ranks(describe)  # it makes a row, which may fail on one rank
    leaves, rebuild = nest.flatten(like)
    if not leaves:
        raise TypeError("cache(filename) keeps arrays, but the elements of this dataset have none: call cache()")
    names = [f"{at} {'.'.join(map(str, path))}".strip().replace("/", "_") for at, path in enumerate(nest.paths(like))]
    for name, leaf in zip(names, leaves, strict=True):
        if leaf.dtype.kind in "OU":  # HDF5 would return bytes
            raise TypeError(
                f"cache(filename) keeps numbers, but array {name!r} of an element has {leaf.dtype}; fix: call cache(), "
                "or map() to numbers or bytes (astype('S')) before"
            )
    # Shuffles without a seed take the seeds of the rows in the folder.
    part = part.with_drawn([seed._replace(value=value) for seed, value in zip(part.seeds(), seeds, strict=True)])
    if not part.streamed:
        part = part.ready(None if ranks is None else ranks_of_node(ranks), ranks)
    if record is not None:
        _write(part, file, names, ranks)
        # The record comes last: a folder without one, of a job that was killed, is written anew.
        publish = partial(replace_text, folder / _RECORD, json.dumps(record))
        publish() if ranks is None else ranks.on_first(publish)
    rows = FileSource.open(Hdf5(), [file], rebuild(names))
    if ranks is not None:
        rows.agree(ranks)
    compare = partial(_compare, part, rows, folder)
    compare() if ranks is None else ranks.on_first(compare)
    return rows


def _compare(part: DatasetPart, rows: FileSource, folder: Path) -> None:
    """Raise ValueError if some rows that the dataset makes now differ from the rows in the folder.

    Arrays of the program, and what its functions refer to, may differ in ways that no record tells.
    """
    which = np.unique(np.linspace(0, len(rows) - 1, _COMPARED_ROWS).astype(int))
    if part.streamed:
        elements = [*itertools.islice(part.plan.elements(0), _COMPARED_ROWS)]
        which = np.arange(len(elements))
    else:
        elements = part.shared_plan.read_list(part.shared_plan.locate(which, 0))
    for row, element, stored in zip(which.tolist(), elements, rows.read_list(which), strict=True):
        if _comparable(element) != _comparable(stored):
            raise ValueError(
                f"row {row} of this dataset is not the one that {folder} keeps: arrays or functions have changed, or "
                "draw at random; fix: remove the folder or name another, and draw in map(fn, seed=...)"
            )


def _comparable(row: Any) -> list[Any]:
    values = []
    for leaf in map(np.asarray, nest.flatten(row)[0]):
        native = leaf.astype(leaf.dtype.newbyteorder("="), copy=False)
        # Structured values may have bytes between their fields, of any content.
        values.append((leaf.shape, native.dtype, repr(native.tolist()) if native.dtype.names else native.tobytes()))
    return values


def _write(part: DatasetPart, file: Path, names: Sequence[str], ranks: Topology | None) -> None:
    from mpistrat.data.write.output_file import Storage, rows_of_plan
    from mpistrat.data.write.write import write_rows, write_stream, write_together

    def named(tree: Any) -> dict[str, Any]:
        return dict(zip(names, nest.flatten(tree)[0], strict=True))

    storage = Storage(None, None)
    file.parent.mkdir(parents=True, exist_ok=True)
    if part.streamed:
        # Rows of a stream have no numbers by which ranks could share them: one rank writes.
        batches = replace(part, transforms=(*part.transforms, Batch(_STREAMED_ROWS, False)))
        write = partial(write_stream, file, map(named, batches.plan.elements(0)), storage, True, False)
        write() if ranks is None else ranks.on_first(write)
        return
    rows = part.length or 0
    which = range(rows) if ranks is None else range(*piece(rows, ranks.size, ranks.rank))
    own_rows = partial(rows_of_plan, part.shared_plan, which, 0, named)
    if ranks is None:
        write_rows([file], own_rows(), storage, True, False)
    else:
        write_together(ranks, [file], own_rows, None, None, True)


def _find_record(folder: Path, part: DatasetPart) -> tuple[Path, dict[str, Any] | None, list[int]]:
    """Return the file of the rows, the record of this dataset if they must be written, and the seeds of the rows.

    Raise ValueError if the folder has the rows of another dataset.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file, and cache(filename) keeps rows in a folder: name another")
    if part.length == 0:
        raise ValueError("this dataset has no rows, and cache(filename) writes none: call cache()")
    order = {
        "pipeline": part.fingerprint(),
        "rows": None if part.streamed else part.length,
        "seeds": [seed.value for seed in part.seeds()],
    }
    # Of orders of rows alone: a state stays good where files are copied, and the cache is made again.
    name = hashlib.blake2b(json.dumps(order).encode(), digest_size=8).hexdigest()
    wanted = {
        "version": _VERSION,
        **order,
        "functions": _functions(part),
        "checksum": 0 if part.streamed else part.source.checksum(),
        "files": part.source.versions(),
        "file": f"rows-{name}.h5",
    }
    path = folder / _RECORD
    if not path.exists():
        return folder / wanted["file"], wanted, wanted["seeds"]
    with naming_damage(str(path)):
        stored = dict(json.loads(path.read_text()))
        # A record of another version may lack entries: only its version is compared.
        known = stored if stored["version"] == _VERSION else {**wanted, "version": stored["version"]}
        differences = [
            f"{field}: {known[field]}, not {wanted[field]}" for field in _COMPARED if known[field] != wanted[field]
        ]
        for file in sorted({*known["files"], *wanted["files"]}):
            then, now = (record["files"].get(file, "absent") for record in (known, wanted))
            differences += [f"file {file!r} (bytes, time in ns) was {then} and is {now}"] * (then != now)
        pairs = zip(known["seeds"], part.seeds(), strict=False)
        differences += [f"a seed is {then}, not {now.value}" for then, now in pairs if now.given and then != now.value]
        file = folder / known["file"]
    if differences:
        more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
        raise ValueError(
            f"{folder} has the cache of another dataset: {differences[0]}{more}; fix: remove it, or name another"
        )
    if not file.exists():
        return folder / wanted["file"], wanted, wanted["seeds"]
    return file, None, known["seeds"]


def _functions(part: DatasetPart) -> list[str]:
    """Return the names of the functions of the program in a dataset, and digests of what they are."""
    from mpistrat.messages.pickling import captured  # a late import: takes 9 ms

    names = [text for inner in getattr(part.source, "parts", ()) for text in _functions(inner)]
    functions = [value for _, value in captured(getattr(part.source, "function", None)) if callable(value)]
    for step in part.transforms:
        if isinstance(step, Map):
            functions.append(step.fn)
        elif isinstance(step, ColumnFilter):
            functions += step.keys.functions
    # Helpers of this package are captured, too; the text of the pipeline says what they do.
    functions = [fn for fn in functions if not str(getattr(fn, "__module__", "")).startswith("mpistrat")]
    return names + [f"{getattr(fn, '__qualname__', type(fn).__name__)} {_digest(fn)}" for fn in functions]


def _digest(function: Any) -> str:
    """Return a digest of the code of a function. What it captures may change with each call: `_compare` judges it."""
    from mpistrat.messages.fingerprint import fingerprint  # a late import: takes 9 ms

    inner = function.func if isinstance(function, partial) else function
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    return fingerprint(code)[:12] if code else ""
