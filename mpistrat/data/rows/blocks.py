"""Blocks: runs of rows that are best read together, and orders of an epoch that keep them together.

Blocks of equal size are permuted as wholes. Then rows are permuted inside windows of a few blocks. Every
number of the order is computed from its position alone, so memory does not grow with the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from mpistrat.data.rows.permutation import Feistel, round_keys

MOST_DECODED = 48 << 20
"""Size of the cache of decoded chunks of which only some rows were read, in bytes.

A batch may have rows of two windows, so a window fills at most half of it. Then no chunk is decoded twice.
"""

OF_MEMORY = 8
"""Number of windows in the memory of a shuffle.

One is in use, two wait, one is read, and two are decoded. The rest is for copies.
"""

_BLOCK_BYTES = 3 << 19  # 1.5 MiB
_LEAST_BLOCK_BYTES = 64 << 10  # where a shuffle has little memory
_WINDOW_BYTES = 48 << 20
_FEWEST, _MOST = 8, 64  # blocks of a window
LEAST_WINDOW_BYTES = _FEWEST * _LEAST_BLOCK_BYTES
"""Size of the window of a shuffle without memory: each file of it is opened once, and not for each batch."""
_TABLE = 256  # blocks


class WholeChunks(NamedTuple):
    """A kind of chunks that can be read only as wholes: rows of a chunk, and its bytes when decoded."""

    rows: int
    nbytes: int


class Blocks(NamedTuple):
    """The division of the rows of files into blocks of ``rows``, of which a window has ``window``.

    ``starts`` has the number of the first row of every file, and as its last entry the number of rows of all files.
    """

    rows: int
    window: int
    starts: np.ndarray

    @classmethod
    def of(
        cls,
        row_bytes: int,
        chunk_rows: int,
        starts: np.ndarray,
        decoded: Collection[Collection[WholeChunks]] = (),
        memory: int | None = None,
    ) -> Blocks:
        """Return blocks of about 1.5 MiB, of whole chunks of ``chunk_rows`` rows where there are chunks.

        A window has 8 to 64 blocks, and at most 48 MiB unless 8 blocks are larger. If chunks must be read as wholes,
        ``decoded`` has their kinds for each dataset. Then a window has at least one block, and no more than can be kept
        decoded. If the ``memory`` of a node for windows is small, a window has an eighth of it, and blocks are smaller:
        a window still has 8 where blocks need not be whole chunks.
        """
        row_bytes = max(1, row_bytes)
        unit = max(1, chunk_rows)
        block_bytes, window_bytes, most_decoded = _BLOCK_BYTES, _WINDOW_BYTES, MOST_DECODED
        if memory is not None:
            window_bytes = min(window_bytes, memory // OF_MEMORY)
            block_bytes = min(block_bytes, max(window_bytes // (2 * _FEWEST), _LEAST_BLOCK_BYTES))
            most_decoded = decoded_bytes(memory)
        rows = unit * max(1, round(block_bytes / (unit * row_bytes)))
        window = min(max(window_bytes // (rows * row_bytes), _FEWEST), _MOST)
        starts = np.asarray(starts, np.int64)
        nbytes = sum(max((_decoded_bytes(chunks, rows, starts) for chunks in kinds), default=0) for kinds in decoded)
        if nbytes:
            window = max(1, min(window, most_decoded // 2 // nbytes))
        return cls(rows, window, starts)

    def one_window(self, count: int) -> bool:
        """Return whether ``count`` rows are so few that they are permuted as a whole."""
        return count <= self.rows * min(_FEWEST, self.window)

    def in_one_run(self, count: int) -> Blocks:
        """Return blocks of the same size for ``count`` rows, without the borders of files."""
        return self._replace(starts=np.array([0, count], np.int64))


def decoded_bytes(memory: int) -> int:
    """Return the size of the cache of decoded chunks of a rank, of the bytes that a node may take for a shuffle."""
    return min(MOST_DECODED, 2 * memory // OF_MEMORY)


def chunk_rows_of(row_bytes: int, largest: int, decoded: Collection[Collection[WholeChunks]]) -> int:
    """Return the number of rows that a block should be a multiple of, as it is of ``largest``.

    Chunks of other datasets that are read as wholes count too, the largest first, while the block fits half the cache.
    """
    unit = max(1, largest)
    for chunks in sorted({chunks for kinds in decoded for chunks in kinds}, key=lambda chunks: -chunks.nbytes):
        common = math.lcm(unit, chunks.rows)
        if common * row_bytes <= MOST_DECODED // 2:
            unit = common
    return unit


def _decoded_bytes(chunks: WholeChunks, rows: int, starts: np.ndarray) -> int:
    """Return the bytes of the chunks that have rows of a block, on average."""
    if rows % chunks.rows:
        # A block begins anywhere in a chunk: this many at most.
        return ((rows + chunks.rows - 2) // chunks.rows + 1) * chunks.nbytes
    # Rows left over at the ends of files make blocks too. These have parts of more chunks.
    whole, rests = np.divmod(np.diff(starts), rows)
    number, rest_blocks = int(whole.sum()), -(-int(rests.sum()) // rows)
    touched = number * (rows // chunks.rows) + int((-(-rests // chunks.rows)).sum()) + rest_blocks
    # In eighths of a chunk, as a mean of whole chunks would be too low.
    return 8 * touched // max(1, number + rest_blocks) * chunks.nbytes // 8


class _Layout:
    """A numbering of rows by blocks: first the whole blocks of all files, then the rest of each file."""

    def __init__(self, blocks: Blocks):
        sizes = np.diff(blocks.starts)
        whole = sizes // blocks.rows
        self._size = blocks.rows
        self._starts = blocks.starts[:-1]
        self._whole_ends = np.cumsum(whole)
        self._rest_starts = self._starts + whole * blocks.rows
        self._rest_ends = np.cumsum(sizes - whole * blocks.rows)
        self.in_whole = int(self._whole_ends[-1]) * blocks.rows  # rows in whole blocks
        self.same = not (sizes[:-1] % blocks.rows).any()  # no number changes

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """Return the rows with these numbers."""
        if self.same:
            return numbers
        rows = np.empty_like(numbers)
        in_whole = numbers < self.in_whole
        block, inside = np.divmod(numbers[in_whole], self._size)
        file = np.searchsorted(self._whole_ends, block, side="right")
        # No rows precede file 0, whose index -1 would count all of them.
        before = self._whole_ends[file - 1] * (file > 0)
        rows[in_whole] = self._starts[file] + (block - before) * self._size + inside
        rest = numbers[~in_whole] - self.in_whole
        file = np.searchsorted(self._rest_ends, rest, side="right")
        rows[~in_whole] = self._rest_starts[file] + rest - self._rest_ends[file - 1] * (file > 0)
        return rows

    def spans(self, first: int, stop: int) -> np.ndarray:
        """Return the rows numbered from ``first`` up to ``stop``, as runs (first, one past the last)."""
        cuts = np.array([first, stop], np.int64)
        if first >= self.in_whole and not self.same:
            ends = self._rest_ends + self.in_whole
            low, high = np.searchsorted(ends, cuts, side="right")
            cuts = np.unique(np.concatenate([cuts[:1], ends[low:high], cuts[1:]]))
        return np.stack([self.rows(cuts[:-1]), self.rows(cuts[1:] - 1) + 1], axis=1)


class BlockOrder:
    """A family of orders of ``n`` rows, one for every (seed, epoch), that keep the rows of blocks together."""

    def __init__(self, n: int, blocks: Blocks | None):
        self._n = n
        if blocks is None or blocks.one_window(n):
            blocks = Blocks(max(1, n), 1, np.array([0, n], np.int64))
        self._size, self._window = blocks.rows, blocks.window
        self._layout = _Layout(blocks)
        # All blocks are whole except for the last one. Its place in the order depends on the key.
        self._whole, self._rest = divmod(n, self._size)
        self._cached: tuple[tuple[int, int], int, np.ndarray] | None = None

    def __call__(self, positions: np.ndarray, seed: int, epoch: int) -> np.ndarray:
        """Return the rows at these positions (int64) of the order."""
        if not len(positions):
            return positions.copy()
        keys = round_keys(seed, epoch, "rows")
        if self._whole == 1 and not self._rest:  # one window
            return Feistel(self._n, keys)(positions, 0)
        ends = np.array([positions.min(), positions.max()])
        (window, last), (start, _), (size, _) = self._windows(ends, seed, epoch)
        if window == last:  # as of nearly all positions that are asked for at once
            mixed = Feistel(int(size), keys)(positions - start, window)
            mixed += start
            return self._rows(mixed, seed, epoch)
        window, start, size = self._windows(positions, seed, epoch)
        mixed = positions - start
        for n in np.unique(size).tolist():
            of_size = size == n
            mixed[of_size] = Feistel(n, keys)(mixed[of_size], window[of_size])
        mixed += start
        return self._rows(mixed, seed, epoch)

    def spans(self, position: int, seed: int, epoch: int) -> tuple[int, np.ndarray]:
        """Return the end of the window of a position, and its rows as an array of (first, one past the last)."""
        _, start, size = self._windows(np.array([position]), seed, epoch)
        stop = int(start[0] + size[0])
        places, _ = self._places(np.array([start[0], stop - 1]), seed, epoch)
        begins = self._table(int(places[0]), int(places[1]), seed, epoch)
        whole = begins + self._size <= self._layout.in_whole
        # A whole block is one run of rows. Other blocks may have the ends of several files.
        firsts = self._layout.rows(begins[whole])
        spans = [self._layout.spans(first, min(first + self._size, self._n)) for first in begins[~whole].tolist()]
        runs = np.concatenate([np.stack([firsts, firsts + self._size], axis=1), *spans])
        return stop, runs[np.argsort(runs[:, 0], kind="stable")]

    def _windows(self, positions: np.ndarray, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return number, start and size of the window of every position."""
        full = self._window * self._size
        missing = self._size - self._rest if self._rest else 0
        short = self._short_at(seed, epoch) // self._window
        # As if the short block were whole: the positions behind its window move on by the missing rows.
        numbers = positions + missing * (positions >= (short + 1) * full - missing)
        window = numbers // full
        start = window * full - missing * (window > short)
        stop = (window + 1) * full - missing * (window >= short)
        return window, start, np.minimum(stop, self._n) - start

    def _short_at(self, seed: int, epoch: int) -> int:
        """Return the place, among the permuted blocks, of the block that is not whole."""
        if not self._rest:
            return self._whole
        return int(round_keys(seed, epoch, "short")[0]) % (self._whole + 1)

    def _rows(self, positions: np.ndarray, seed: int, epoch: int) -> np.ndarray:
        """Return the rows at these positions when only the blocks are permuted."""
        places, inside = self._places(positions, seed, epoch)
        low, high = int(places.min()), int(places.max())
        # Dense: each block of the range is asked for, most of them many times.
        if high - low < len(places):
            numbers, places = self._table(low, high, seed, epoch), places - low
        else:
            numbers, places = self._first_numbers(places, seed, epoch), np.arange(len(places))
        if self._layout.same:
            return numbers[places] + inside
        rows = self._layout.rows(numbers)[places] + inside
        scattered = (numbers >= self._layout.in_whole)[places]
        rows[scattered] = self._layout.rows(numbers[places[scattered]] + inside[scattered])
        return rows

    def _places(self, positions: np.ndarray, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the place of each position among the permuted blocks, and its offset in the block."""
        if self._rest:
            # Behind the short block, positions move on as if it were whole.
            end = self._short_at(seed, epoch) * self._size + self._rest
            positions = positions + (self._size - self._rest) * (positions >= end)
        place = positions // self._size
        return place, positions - place * self._size

    def _table(self, low: int, high: int, seed: int, epoch: int) -> np.ndarray:
        """Return `_first_numbers` of consecutive places. The places that follow are computed too, and kept."""
        cached = self._cached
        if cached is None or cached[0] != (seed, epoch) or not cached[1] <= low <= high < cached[1] + len(cached[2]):
            last = min(max(high + 1, low + _TABLE), self._whole + (self._rest > 0))
            cached = ((seed, epoch), low, self._first_numbers(np.arange(low, last), seed, epoch))
            self._cached = cached
        return cached[2][low - cached[1] : high + 1 - cached[1]]

    def _first_numbers(self, places: np.ndarray, seed: int, epoch: int) -> np.ndarray:
        """Return the number of the first row of the blocks at these places, in the numbering of `_Layout`."""
        short = self._short_at(seed, epoch)
        # The short block has its own place, so the whole blocks behind that place move on by one.
        whole = Feistel(self._whole, round_keys(seed, epoch, "blocks"))
        numbers = whole(np.clip(places - (places > short), 0, max(0, self._whole - 1)))
        numbers[places == short] = self._whole
        return numbers * self._size
