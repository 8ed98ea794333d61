"""Pieces of arrays, cut to fit a slot of the node's memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

# Places in the slot, and the parts of arrays that lie there.
Piece = Sequence[tuple[slice, np.ndarray]]


def cut(arrays: Iterable[np.ndarray], room: int) -> Iterator[Piece]:
    """Yield the elements of flat arrays in pieces of ``room`` elements; the last one may be shorter.

    >>> [[len(part) for _, part in piece] for piece in cut([np.zeros(3), np.zeros(0), np.zeros(4)], 5)]
    [[3, 2], [2]]
    """
    piece, used = [], 0
    for array in arrays:
        start = 0
        while start < len(array):
            part = array[start : start + room - used]
            piece.append((slice(used, used + len(part)), part))
            start += len(part)
            used += len(part)
            if used == room:
                yield piece
                piece, used = [], 0
    if piece:
        yield piece


def lay(piece: Piece, slot: np.ndarray) -> None:
    for where, part in piece:
        slot[where] = part


def take(piece: Piece, slot: np.ndarray) -> None:
    for where, part in piece:
        part[...] = slot[where]
