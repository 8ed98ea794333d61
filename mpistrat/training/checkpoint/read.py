"""Reading and verifying the arrays of a checkpoint file."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import h5py
import numpy as np

from mpistrat.arrays.arrays import as_bytes
from mpistrat.data.errors import ChecksumError, DataFileError, check_bytes
from mpistrat.data.hdf5.open_file import has_no_links, opened
from mpistrat.representation import few
from mpistrat.storage.layout import Box, checksum, read_box
from mpistrat.training.checkpoint.format import (
    CHECKSUM,
    CHECKSUMS,
    DTYPE,
    FORMAT_VERSION,
    OF_BOXES,
    OF_REPLICAS,
    PIECE_BYTES,
    VERSION,
    XXH3,
    dtype_of,
    stored,
)

_MOST_OF_ATTRIBUTE = 64 << 10  # that HDF5 has room for
_log = logging.getLogger("mpistrat.training")
_MOST_NAMED = 10  # names in a message
_MOST_BOXES = 1 << 22  # of an array: 4 MiB each, so that a table is bounded before it is read
_FIX = "fix: load an earlier checkpoint, or copy this one again"


def read(values: Mapping[str, np.ndarray], path: Path, boxes: Sequence[tuple[str, Box, np.ndarray]] = ()) -> set[str]:
    """Fill contiguous arrays from a checkpoint file, and return the names that it has.

    Values below `OF_REPLICAS` may be missing, or be of another number of replicas. ``boxes`` has the name of an array,
    the offset of a box in it with the shape of the whole array, and the memory for the box. Only the pieces of these
    arrays are read that a box touches.

    Raise FileNotFoundError if it does not exist. Raise one ValueError for all arrays that are missing in it, or have
    another shape or dtype there. Raise DataFileError if it is not an HDF5 file, is truncated or is damaged, and
    ChecksumError if the bytes of an array are not as they were written.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    with opened(str(path)) as file, open(path, "rb", buffering=0) as raw, ThreadPoolExecutor(2) as pool:
        checked_bytes = _checked_bytes(path, file)
        pieces: list[_Fetch] = []
        cut: list[tuple[np.ndarray, np.ndarray]] = []
        names, missing, others = set(), [], []
        whole_arrays = [(name, Box((0,) * into.ndim, into.shape), into) for name, into in values.items()]
        for name, box, into in [*whole_arrays, *boxes]:
            # Optional: the file may be of another number of virtual replicas, or of none.
            if name.startswith(OF_REPLICAS) and _shape(path, file, name) != into.shape:
                continue
            dataset = _find(path, file, name)
            if dataset is None and _is_rate_of_other_kind(path, file, name):
                continue
            names.add(name)
            if dataset is None:
                missing.append(repr(name))
            elif dataset.shape != box.shape or dataset.dtype != into.dtype.name:
                others.append(
                    f"variable {name!r} is {dataset.dtype} of shape {dataset.shape} there, and {into.dtype.name} of "
                    f"shape {box.shape} here"
                )
            elif _shape(path, file, OF_BOXES + name) is not None:
                pieces += _slabs(path, name, file, dataset, Box(box.offset, into.shape), into)
            elif (dataset.checksums is None) != (checked_bytes is None):
                _refuse(path, name, "its checksums are missing")
            elif into.nbytes and into.shape == box.shape:
                pieces += _pieces(path, name, dataset, into, checked_bytes, 0)
            elif into.nbytes:  # it was saved as one array
                first, around, part = _around(dataset, box.offset, into, checked_bytes)
                cut.append((into, part))
                pieces += _pieces(path, name, dataset, around, checked_bytes, first)
        if missing:
            others.insert(
                0, f"it has no variable {few([*dict.fromkeys(missing)], _MOST_NAMED)}: it has {_names(path, file)}"
            )
        if others:
            raise ValueError(f"{path}: {few([*dict.fromkeys(others)], _MOST_NAMED, '; ')}")
        # Two threads: one reads while the other computes a checksum.
        for _ in pool.map(lambda fetch: fetch(raw.fileno()), pieces):
            pass
        for into, part in cut:
            into[...] = part
    return names


def _is_rate_of_other_kind(path: Path, file: h5py.File, name: str) -> bool:
    """Return whether a name is the rate of an optimizer that had a schedule, or was saved by an older version."""
    optimizer, _, last = name.rpartition("/")
    if last != "learning_rate" or _find(path, file, f"{optimizer}/iterations") is None:
        return False
    _log.warning("%s has no %s: the learning rate of the program stays", path, name)
    return True


def require_parts(path: Path, name: str, count: int, by_replica: bool) -> None:
    """Raise ValueError unless a file has the parts of that many ranks, or replicas."""
    kind = "replica" if by_replica else "rank"
    parts = [key for key in contents(path) if key.startswith(f"{name}/")]
    if len(parts) != count:
        raise ValueError(
            f"{path} has {name!r} of {len(parts)} {kind}s, and there are {count} now: load with as many, or all of "
            "them by load_arrays(path)"
        )


def contents(path: Path) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Return the names, dtypes and shapes of the arrays in a checkpoint file.

    Raise FileNotFoundError and DataFileError as `read`, also for an array that the file has no bytes for.
    """
    return {name: entry[:2] for name, entry in described(path).items() if not name.startswith(OF_REPLICAS)}


def described(path: Path) -> dict[str, tuple[np.dtype, tuple[int, ...], int]]:
    """Return dtype, shape and number of checksums by name, also of what is in `OF_REPLICAS`. Raise as `contents`."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    size = path.stat().st_size
    with opened(str(path)) as file:
        _checked_bytes(path, file)
        with _refusing(path, None, "its contents cannot be read"):
            datasets = {name: _look_at(file[name]) for name in _datasets(file)}
            for name, dataset in datasets.items():
                nbytes = math.prod(dataset.shape) * dataset.stored.itemsize
                if dataset.offset is None:
                    check_bytes(nbytes, f"file {str(path)!r}, dataset {name!r}", "it")
                elif dataset.offset + nbytes > size:
                    raise ValueError(f"dataset {name!r} would end at byte {dataset.offset + nbytes} of {size}")
            boxes = {name: dataset.shape[0] for name, dataset in datasets.items() if name.startswith(OF_BOXES)}
            return {
                name: (
                    dtype_of(dataset.dtype, dataset.stored),
                    dataset.shape,
                    boxes.get(OF_BOXES + name, len(dataset.checksums or ())),
                )
                for name, dataset in datasets.items()
                if name not in boxes
            }


class _Dataset(NamedTuple):
    """A dataset of a checkpoint file, with its ``offset`` there, or None if its bytes are not contiguous."""

    dataset: Any
    shape: tuple[int, ...]
    dtype: str
    stored: np.dtype
    offset: int | None
    checksums: list[int] | None


_Fetch = Callable[[int], None]


def _fetch(
    path: Path,
    name: str,
    label: str,
    box: Box,
    shape: tuple[int, ...],
    dtype: np.dtype,
    offset: int | None,
    expected: int | None,
    into: np.ndarray,
    of_into: Box,
    descriptor: int,
) -> None:
    """Read what ``box`` of the file and ``of_into`` share into ``into``. Verify the checksum of the box, if it has one.

    ``offset`` is where the array begins in the file, None if it is read already.
    """
    in_place = box == of_into and into.dtype == dtype
    values = into if in_place else np.empty(box.shape, dtype)
    if offset is not None and not read_box(descriptor, values, box.offset, shape, offset):
        _refuse(path, name, "the file ends in the middle of it")
    if expected is not None and checksum(as_bytes(values).data, name) != expected:
        raise ChecksumError(
            f"file {str(path)!r}, dataset {name!r}: {label} are not those that were written under this name; {_FIX}"
        )
    if not in_place:
        common = box.common(of_into)
        into[common.slices(of_into.offset)] = values[common.slices(box.offset)]


def _slabs(path: Path, name: str, file: h5py.File, entry: _Dataset, box: Box, into: np.ndarray) -> Iterator[_Fetch]:
    """Yield what a box needs of an array that ranks wrote as blocks. Raise DataFileError if its table is damaged."""
    axes, count = len(entry.shape), 0
    table = _find(path, file, OF_BOXES + name)
    if table is None or (entry.offset is None and into.size) or len(table.shape) != 2 or table.shape[1] != 2 * axes + 1:
        _refuse(path, name, "it has no place in the file, or no boxes")
    # Before its rows are read: a damaged table may claim any number of them.
    if table.stored != np.uint64 or table.shape[0] > _MOST_BOXES:
        _refuse(path, name, f"its table of boxes has the dtype {table.stored} and {table.shape[0]} rows")
    with _refusing(path, name, "its boxes cannot be read"):
        numbers = np.ascontiguousarray(table.dataset[()])
    if table.checksums != [checksum(as_bytes(numbers).data, name)]:
        raise ChecksumError(f"file {str(path)!r}, dataset {name!r}: its table of boxes is damaged; {_FIX}")
    rows = numbers.tolist()
    dtype = into.dtype if stored(into.dtype) == entry.stored else entry.stored
    for *numbers, expected in rows:
        stored_box = Box(tuple(numbers[:axes]), tuple(numbers[axes:]))
        if stored_box.common(Box((0,) * axes, entry.shape)) != stored_box:
            _refuse(path, name, f"its boxes are not inside of its shape {entry.shape}")
        common = math.prod(stored_box.common(box).shape)
        if common:
            count += common
            label = f"the values of the box of shape {stored_box.shape} at {stored_box.offset}"
            yield partial(
                _fetch, path, name, label, stored_box, entry.shape, dtype, entry.offset or 0, expected, into, box
            )
    # Boxes of a valid file do not overlap (`require_cover`), so a smaller count is a gap.
    if count != into.size:
        _refuse(path, name, f"its boxes have {count} of the {into.size} elements to read")


def _around(
    dataset: _Dataset, offset: Sequence[int], box: np.ndarray, checked_bytes: int | None
) -> tuple[int, np.ndarray, np.ndarray]:
    """Return the first byte of the pieces around a box, an array for these pieces, and a view of the box in it."""
    size, total = box.itemsize, box.itemsize * math.prod(dataset.shape)
    strides = [size * math.prod(dataset.shape[axis + 1 :]) for axis in range(box.ndim)]
    low = sum(stride * o for stride, o in zip(strides, offset, strict=True))
    high = low + size + sum(stride * (n - 1) for stride, n in zip(strides, box.shape, strict=True))
    # Not a run of bytes with checksums between elements: all of it is read.
    is_whole = checked_bytes is None or not _is_plain(dataset, box.dtype) or checked_bytes % size > 0
    piece = total if checked_bytes is None or is_whole else checked_bytes
    first = low // piece * piece
    around = np.empty((min(-(-high // piece) * piece, total) - first) // size, box.dtype)
    part = np.ndarray(box.shape, box.dtype, as_bytes(around), low - first, strides)
    return first, around.reshape(dataset.shape) if is_whole else around, part


def _is_plain(dataset: _Dataset, dtype: np.dtype) -> bool:
    """Return whether the file has the array contiguously, in this dtype."""
    return dataset.offset is not None and dataset.stored == stored(dtype)


def _pieces(
    path: Path, name: str, entry: _Dataset, into: np.ndarray, piece: int | None, first: int
) -> Iterator[_Fetch]:
    """Yield the pieces of an array of the file from its byte ``first`` on, until ``into`` is full."""
    data, offset, nbytes = as_bytes(into), entry.offset, math.prod(entry.shape) * into.itemsize
    if not _is_plain(entry, into.dtype):
        # Chunked, compressed or of another byte order: HDF5 converts it.
        offset = None
        with _refusing(path, name):
            entry.dataset.read_direct(into.view(stored(into.dtype)))
    checksums: Sequence[int | None] = [None] if piece is None else entry.checksums or []
    step = piece or nbytes
    if -(-nbytes // step) != len(checksums):
        _refuse(path, name, f"it has {len(checksums)} checksums for {-(-nbytes // step)} pieces")
    for start in range(first, first + len(data), step):
        box = Box((start,), (min(step, first + len(data) - start),))
        label, rest = f"bytes {start} to {start + box.shape[0] - 1}", data[start - first :][:step]
        yield partial(
            _fetch, path, name, label, box, (nbytes,), data.dtype, offset, checksums[start // step], rest, box
        )


def _checked_bytes(path: Path, file: h5py.File) -> int | None:
    """Return the bytes per checksum, None for a file without any. Raise DataFileError for a later format."""
    with _refusing(path, None, "its attributes cannot be read"):
        version = int(_attribute(file, FORMAT_VERSION) or VERSION)
        checked, kind = _attribute(file, PIECE_BYTES), _attribute(file, CHECKSUM)
        piece = None if checked is None else int(checked)
        kind = None if kind is None else bytes(kind).decode()
    if version > VERSION:
        raise DataFileError(
            f"file {str(path)!r}: a later version of mpistrat wrote it (format {version}, and {VERSION} is the last "
            "that this version reads); fix: update mpistrat"
        )
    if piece is None:
        if kind is not None:
            _refuse(path, None, f"its attribute {PIECE_BYTES!r} is missing")
        return None
    if piece <= 0:
        _refuse(path, None, f"its checksums are of {piece} bytes each")
    if kind != XXH3:
        _refuse(
            path, None, f"its checksums are of the kind {kind!r}, which this version does not know: update mpistrat"
        )
    return piece


def _shape(path: Path, file: h5py.File, name: str) -> Any:
    with _refusing(path, name):
        return getattr(file.get(name), "shape", None)


def _find(path: Path, file: h5py.File, name: str) -> _Dataset | None:
    """Return the dataset of a name, None without one."""
    with _refusing(path, name):
        if not has_no_links(file, name):
            raise ValueError("it is a link, which no checkpoint has")
        dataset = file.get(name)
        return _look_at(dataset) if isinstance(dataset, h5py.Dataset) else None


def _look_at(dataset: h5py.Dataset) -> _Dataset:
    layout = dataset.id.get_create_plist()
    if dataset.is_virtual or layout.get_external_count():
        raise ValueError("its values lie in other files, which no checkpoint names")
    contiguous = layout.get_layout() == h5py.h5d.CONTIGUOUS
    checksums = _attribute(dataset, CHECKSUMS)
    kind, dtype = dataset.dtype, _attribute(dataset, DTYPE)
    return _Dataset(
        dataset,
        dataset.shape,
        kind.name if dtype is None else dtype.decode() if isinstance(dtype, bytes) else str(dtype),
        kind,
        dataset.id.get_offset() if contiguous else None,
        None if checksums is None else np.atleast_1d(checksums).tolist(),
    )


def _attribute(owner: Any, name: str) -> Any:
    """Return the value of an HDF5 attribute, or None if it does not exist."""
    if not h5py.h5a.exists(owner.id, name.encode()):
        return None
    nbytes = h5py.h5a.open(owner.id, name.encode()).get_storage_size()
    if nbytes > _MOST_OF_ATTRIBUTE:  # h5py would begin to fill memory
        raise ValueError(f"its attribute {name!r} has {nbytes} bytes")
    return owner.attrs[name]


def _refuse(path: Path, name: str | None, reason: str) -> NoReturn:
    location = f"file {str(path)!r}" if name is None else f"file {str(path)!r}, dataset {name!r}"
    raise DataFileError(f"{location}: {reason}; {_FIX}")


@contextlib.contextmanager
def _refusing(path: Path, name: str | None, problem: str = "it cannot be read") -> Iterator[None]:
    """Raise any error as a DataFileError: h5py answers damage with errors of any kind."""
    try:
        yield
    except DataFileError:
        raise
    except Exception as error:
        _refuse(path, name, f"{problem}: {error}")


def _names(path: Path, file: h5py.File) -> str:
    with _refusing(path, None, "its contents cannot be read"):
        names = _datasets(file)
    return few([repr(name) for name in names if not name.startswith(OF_REPLICAS)], _MOST_NAMED) or "none"


def _datasets(file: h5py.File) -> list[str]:
    """Return the names of the datasets that have values: h5py's Empty has no shape."""
    names: list[str] = []
    file.visititems(lambda name, item: names.append(name) if getattr(item, "shape", None) is not None else None)
    return names
