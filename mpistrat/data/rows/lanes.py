"""Lanes: an order of an epoch that keeps files apart, for any number of ranks.

The files of an epoch are permuted, and blocks of rows inside each file. The rows of the files follow each other. This
sequence is cut into lanes of equal length, and rows are permuted in windows of a lane.
Every global batch takes its rows from all lanes, in the order of the lanes. So a contiguous piece of every batch is a
contiguous part of the sequence: a rank that reads such pieces opens its part of the files, and a file at each end that
it shares. The order does not depend on the ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpistrat.data.rows.blocks import Blocks
from mpistrat.data.rows.permutation import Feistel, permutation, random_words, round_keys
from mpistrat.process.cache import Cache


def piece(n: int, replicas: int, replica: int) -> tuple[int, int]:
    """Return first row and end of a replica's piece of ``n`` rows. The first ``n % replicas`` have one row more."""
    size, longer = divmod(n, replicas)
    first = replica * size + min(replica, longer)
    return first, first + size + (replica < longer)


def pieces(n: int, replicas: int, block: range) -> tuple[int, int]:
    """Return the first row of the pieces of consecutive replicas, and one past the last. `part_of` cuts out one."""
    return piece(n, replicas, block[0])[0], piece(n, replicas, block[-1])[1]


def part_of(rows: Any, replicas: int, replica: int) -> Any:
    """Return a replica's piece of rows; None for None."""
    return None if rows is None else rows[slice(*piece(len(rows), replicas, replica))]


MOST_LANES = 4096
"""Most lanes: a rank that is alone reads files of all of them side by side."""


class Lanes(NamedTuple):
    """The number of lanes. A global batch of ``batch`` rows takes equal shares from them."""

    batch: int
    number: int


class _Files(NamedTuple):
    """The permuted files of an epoch: end in the sequence, first row, number of rows, and row that comes first."""

    ends: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    turns: np.ndarray
    blocks: Cache[int, np.ndarray]
    """The order of the blocks of files by their number."""


class LaneOrder:
    """A family of orders of the rows of files, one for every (seed, epoch).

    >>> starts = np.array([0, 4, 8, 12, 16])
    >>> order = LaneOrder(Blocks(1, 1, starts), Lanes(batch=4, number=4))
    >>> batch = np.arange(4)
    >>> sorted((order(batch, seed=7, epoch=0) // 4).tolist())  # a row of each file
    [0, 1, 2, 3]
    """

    def __init__(self, blocks: Blocks, lanes: Lanes):
        self._rows, self._starts = int(blocks.starts[-1]), blocks.starts
        self._batch = lanes.batch
        self._full = self._rows // lanes.batch  # number of batches, without a smaller last one
        cuts = [piece(lanes.batch, lanes.number, lane)[0] for lane in range(lanes.number)] + [lanes.batch]
        begins = [self._rows * cut // lanes.batch for cut in cuts]  # Python's integers: the products are large
        # Begin of each lane in a full batch and in the last one, and in the sequence of all rows.
        self._cuts, self._begins = np.array(cuts), np.array(begins)
        self._last = self._begins - self._full * self._cuts
        self._shares, self._lengths = np.diff(self._cuts), np.diff(self._begins)
        self._lane_of = np.repeat(np.arange(lanes.number), self._shares)
        # Windows of all lanes together are a window of blocks, which is small enough to be read at once.
        self._window = self._rows if blocks.one_window(self._rows) else blocks.rows * blocks.window // lanes.number
        self._window = max(1, self._window)
        self._block, self._of_blocks = blocks.rows, bool((np.diff(blocks.starts) >= 2 * blocks.rows).any())
        self._kept = Cache[tuple[int, int], _Files](2)  # a batch may lie across two epochs

    def __call__(self, positions: np.ndarray, seed: int, epoch: int) -> np.ndarray:
        """Return the rows at these positions (int64) of the order."""
        lane, offset = self._in_lanes(positions)
        window = offset // self._window
        start = window * self._window
        sizes = np.minimum(self._lengths[lane] - start, self._window)
        offset -= start
        # The tweak gives each window of each lane another order by the same keys.
        keys, tweaks = round_keys(seed, epoch, "lanes"), window * len(self._shares) + lane
        for size in np.unique(sizes).tolist():  # of the windows, and of the last window of each lane: few values
            of_size = np.flatnonzero(sizes == size)
            offset[of_size] = Feistel(size, keys)(offset[of_size], tweaks[of_size])
        files = self._files(seed, epoch)
        file, offset = self._in_files(self._begins[lane] + start + offset, files)
        if self._of_blocks:
            self._permute_blocks(file, offset, files, (seed, epoch))
        return files.starts[file] + offset

    def _in_lanes(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the lane of each position, and the place in the lane."""
        batch, offset = np.divmod(positions, self._batch)
        lane = self._lane_of[offset]
        offset += batch * self._shares[lane] - self._cuts[lane]
        last = np.flatnonzero(batch == self._full)
        if len(last):
            # The last batch has fewer rows, so lanes have other shares of it.
            rest = positions[last] - self._full * self._batch
            lane[last] = of_last = self._last.searchsorted(rest, side="right") - 1
            offset[last] = self._full * self._shares[of_last] + rest - self._last[of_last]
        return lane, offset

    def _files(self, seed: int, epoch: int) -> _Files:
        key = seed, epoch
        if key in self._kept:
            return self._kept[key]
        order = permutation(len(self._starts) - 1, seed, epoch)
        sizes = np.diff(self._starts)[order]
        # Each file begins with another of its rows. Otherwise lanes whose files are sorted in the same way, by class
        # for example, would be at the same class in the same batch.
        words = random_words(len(order), seed, epoch, "turns")
        turns = (words % np.maximum(sizes, 1).astype(np.uint64)).astype(np.int64)
        return self._kept.keep(key, _Files(sizes.cumsum(), self._starts[order], sizes, turns, Cache(2 * MOST_LANES)))

    @staticmethod
    def _in_files(places: np.ndarray, files: _Files) -> tuple[np.ndarray, np.ndarray]:
        """Return the file of each place of the sequence, and the place in the file."""
        file = files.ends.searchsorted(places, side="right")
        sizes = files.sizes[file]
        places += sizes - files.ends[file] + files.turns[file]
        places -= sizes * (places >= sizes)
        return file, places

    def _permute_blocks(self, file: np.ndarray, offset: np.ndarray, files: _Files, key: tuple[int, int]) -> None:
        """Permute places by the blocks of their files, without a smaller last block."""
        whole = files.sizes[file] // self._block
        block, inside = np.divmod(offset, self._block)
        permuted = np.flatnonzero((whole > 1) & (block < whole))
        if not len(permuted):
            return
        numbers, inverse = np.unique(file[permuted], return_inverse=True)
        orders = []
        for number in numbers.tolist():
            order = files.blocks.get(number)
            if order is None:
                words = random_words(int(files.sizes[number]) // self._block, *key, "blocks", number)
                order = files.blocks.keep(number, np.argsort(words, kind="stable"))
            orders.append(order)
        begins = np.cumsum([0, *map(len, orders)])
        block = np.concatenate(orders)[begins[inverse] + block[permuted]]
        offset[permuted] = block * self._block + inside[permuted]
