"""What HDF5 tells of the chunks of a dataset, and that it can be true.

The index of chunks in a file of HDF5's default format has no checksum. HDF5 follows a damaged one and takes whatever
lies at the places it names for rows. Most damage contradicts the shape of the dataset, or other entries of the index.
"""

from __future__ import annotations

import math
from array import array
from typing import Any, NamedTuple

import h5py
import numpy as np

from mpistrat.data import limits
from mpistrat.data.errors import DataFileError
from mpistrat.data.hdf5.codecs import SHUFFLE
from mpistrat.runtime.environment import rc


class ChunkIndex(NamedTuple):
    """The chunks that are in the file, in C order of the grid that all of them make.

    Attributes
    ----------
    numbers : numpy.ndarray
        The place of each in the grid, ascending.
    offsets, sizes, masks : numpy.ndarray
        The stored bytes of each, and which filters were skipped, bit by bit.
    """

    numbers: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    masks: np.ndarray


def chunk_index(dataset: h5py.Dataset, where: str) -> ChunkIndex:
    """Return the index of a dataset, which ``where`` names in errors.

    Raises
    ------
    DataFileError
        If it contradicts the shape of the dataset or itself.
    """
    shape, chunk = np.array(dataset.shape, np.uint64), np.array(dataset.chunks, np.uint64)
    grid = -(-np.array(dataset.shape) // dataset.chunks)
    possible = math.prod(grid.tolist())
    found = _chunks(dataset, min(possible, rc.data_blocks))
    limits.check_blocks(min(len(found), possible), where)
    if len(found) > possible:
        raise _damaged(where, f"it has more than the {possible} chunks that shape {dataset.shape} allows")
    corners, (masks, offsets, sizes) = found[:, : len(grid)], found[:, len(grid) :].T
    _check_corners(where, corners, shape, chunk)
    numbers = np.ravel_multi_index(tuple((corners // chunk).astype(np.int64).T), tuple(grid))
    order = np.argsort(numbers)
    index = ChunkIndex(numbers[order], offsets[order], sizes[order], masks[order])
    twice = np.flatnonzero(index.numbers[1:] == index.numbers[:-1])
    if len(twice):
        corner = corners[order[twice[0]]].tolist()
        raise _damaged(where, f"it has two chunks that begin at element {corner}")
    _check_filters(where, index, dataset)
    return index


def check_places(where: str, index: ChunkIndex, file_bytes: int) -> None:
    """See that the stored bytes of chunks lie inside of a file of this size, none of them in two chunks.

    Raises
    ------
    DataFileError
        If not.
    """
    order = np.argsort(index.offsets, kind="stable")
    starts, sizes = index.offsets[order], index.sizes[order]
    # Compared without a sum, which might wrap around.
    end = np.uint64(file_bytes)
    outside = np.flatnonzero((starts > end) | (sizes > end - np.minimum(starts, end)))
    if len(outside):
        raise _damaged(
            where,
            f"it has a chunk of {sizes[outside[0]]} bytes at byte {starts[outside[0]]} of a file of {file_bytes}",
        )
    common = np.flatnonzero(sizes[:-1] > starts[1:] - starts[:-1])
    if len(common):
        raise _damaged(
            where, f"its chunks at bytes {starts[common[0]]} and {starts[common[0] + 1]} of the file overlap"
        )


def _chunks(dataset: h5py.Dataset, most: int) -> np.ndarray:
    """Return a line of numbers for each chunk, or for ``most + 1``: its corner, filter mask, offset and size."""
    # One object for all: 100,000 tuples take 39 MB, and time of the garbage collector.
    numbers = array("Q")
    width = dataset.ndim + 3

    def take(chunk: Any) -> bool | None:
        corner, mask, offset, size = chunk
        numbers.extend((*corner, mask, offset, size))
        return True if len(numbers) > most * width else None  # anything but None ends it

    if hasattr(dataset.id, "chunk_iter"):
        dataset.id.chunk_iter(take)
    else:  # h5py on HDF5 1.10; seventy times as slow
        for i in range(min(dataset.id.get_num_chunks(), most + 1)):
            take(dataset.id.get_chunk_info(i))
    return np.array(numbers, np.uint64).reshape(-1, width)


def _check_corners(where: str, corners: np.ndarray, shape: np.ndarray, chunk: np.ndarray) -> None:
    wrong = np.flatnonzero(((corners >= shape) | (corners % chunk != 0)).any(axis=1))
    if len(wrong):
        corner = corners[wrong[0]].tolist()
        raise _damaged(
            where,
            f"it has a chunk that begins at element {corner}, where none of shape {tuple(chunk.tolist())} can in a "
            f"dataset of shape {tuple(shape.tolist())}",
        )


def _check_filters(where: str, index: ChunkIndex, dataset: h5py.Dataset) -> None:
    plist = dataset.id.get_create_plist()
    filters = [plist.get_filter(number)[0] for number in range(plist.get_nfilters())]
    all_skipped = np.uint64((1 << len(filters)) - 1)
    if (index.masks > all_skipped).any():
        raise _damaged(
            where, f"it has a chunk that skips filters which the dataset, with {len(filters)}, lacks"
        )
    element = dataset.id.get_type().get_size()
    whole = math.prod(dataset.chunks) * element
    wrong = np.flatnonzero((index.masks == all_skipped) & (index.sizes != whole))
    if len(wrong) and not dataset.dtype.hasobject:  # a string of variable length has another size in the file
        raise _damaged(
            where,
            f"it has a chunk of {index.sizes[wrong[0]]} bytes where chunks without filters have {whole}",
        )
    if SHUFFLE in filters:
        # A chunk that another filter made smaller was shuffled before, as all others: HDF5 never fails in that.
        number = filters.index(SHUFFLE)
        shuffled = plist.get_filter(number)[2]
        # HDF5 sets it, but not for types of variable length. It would mix the bytes of several elements.
        if shuffled != (element,) and not dataset.dtype.hasobject:
            raise _damaged(
                where, f"its shuffle filter has parameters {shuffled} for elements of {element} bytes"
            )
        skips = (index.masks >> np.uint64(number) & np.uint64(1)).astype(bool)
        if (skips & (index.masks != all_skipped)).any() and not skips.all():
            raise _damaged(where, "it has a chunk that skips the shuffle filter, and another that does not")


def _damaged(where: str, what: str) -> DataFileError:
    return DataFileError(
        f"{where}: its index of chunks is damaged, as {what}; fix: copy or write the file again"
    )
