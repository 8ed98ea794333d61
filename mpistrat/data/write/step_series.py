"""A dataset that grows by steps: its chunks, and which of them a rank's block lies in."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpistrat.data.write.boxes import Box


class StepSeries:
    """A dataset whose first axis grows. ``shape`` is that of a step, and ``chunk`` begins with a number of steps.

    ``steps`` counts the appended steps, of which ``committed`` are in the file. ``boxes`` are those of the ranks.
    """

    def __init__(self, name: str, dtype: np.dtype, shape: tuple[int, ...], chunk: tuple[int, ...]):
        self.name, self.dtype, self.shape, self.chunk = name, dtype, shape, chunk
        self.attributes: dict[str, Any] = {}
        self.steps = self.committed = 0
        self.place = 0  # where the chunk of the last step begins in the file
        self.boxes: Sequence[Box] = ()
        self.grid = tuple(-(-size // part) for size, part in zip(shape, chunk[1:], strict=True))
        self.cells = math.prod(self.grid)  # chunks that a step lies in
        self.chunk_bytes = math.prod(chunk) * dtype.itemsize
        self.compressed = False

    def __str__(self) -> str:
        return f"{self.name!r} {self.dtype} {self.shape}"

    def parts(self, rank: int) -> Iterator[tuple[int, Box, tuple[slice, ...]]]:
        """Yield the cells that a rank writes to: number, the box inside of the cell, and the elements of the block."""
        box = self.boxes[rank]
        if 0 in box.shape or (rank and not self.shape):  # rank 0 writes what is the same on all
            return
        ranges = [range(o // c, -(-(o + n) // c)) for o, n, c in zip(*box, self.chunk[1:], strict=True)]
        for cell in itertools.product(*ranges):
            number, first, size, here = 0, [], [], []
            for i, o, n, c, grid in zip(cell, *box, self.chunk[1:], self.grid, strict=True):
                start, stop = max(o, i * c), min(o + n, (i + 1) * c)
                number = number * grid + i
                first.append(start - i * c)
                size.append(stop - start)
                here.append(slice(start - o, stop - o))
            yield number, Box(tuple(first), tuple(size)), tuple(here)


def rows_of_a_chunk(name: str, dtype: np.dtype, part: Sequence[int], largest: int) -> tuple[int, ...]:
    """Return the shape of ``part`` with as many rows as ``largest`` bytes have. Raise ValueError if no row fits."""
    nbytes = math.prod(part) * dtype.itemsize
    if nbytes <= largest:
        return tuple(part)
    rows = largest // (nbytes // part[0])
    if not rows:
        raise ValueError(f"{name!r}: an element along axis 0 has {nbytes // part[0]} bytes; fix: swap the axes")
    # A divisor, so that the chunks of a rank end where its block does.
    fitting = (each for each in range(rows, rows // 4, -1) if part[0] % each == 0)
    return next(fitting, rows), *part[1:]
