"""The packing of arrays: into messages, one flat array for each dtype, and into pieces that fit a slot of the node.

How a list is packed depends on dtypes and shapes only. The same packing serves arrays on the host and on a GPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat.collectives.operations import COMBINE, Op, accumulator, result_dtype
from mpistrat.memory.buffer_pool import Buffers
from mpistrat.values import ReduceOp

# New memory costs a page fault for every 4 KiB of a result, which takes longer than the sum. A training step has as
# many results as gradients, so their memory is reused.
_results = Buffers()
SMALL = 4096  # elements; up to this length new memory is cheaper than the buffer pool

Key = tuple[tuple[np.dtype, tuple[int, ...]], ...]


class Run(NamedTuple):
    """Arrays of one shape that follow each other in a message."""

    where: slice
    length: int
    shape: tuple[int, ...]


class Message(NamedTuple):
    """Arrays of one dtype that are reduced as one flat array."""

    members: tuple[int, ...]  # the indices of the arrays in the list, ascending
    runs: tuple[Run, ...]  # the place of each array in the message
    slices: tuple[slice, ...]  # the same if all arrays are vectors, else empty
    length: int  # the number of elements
    # the axis along which the arrays are joined: 0 if all are vectors, else None, which flattens and is slower
    axis: int | None
    # the dtypes of the arrays, of what is combined, and of the results
    source: np.dtype
    wire: np.dtype
    result: np.dtype
    combine: np.ufunc
    divisor: int  # the number of replicas for a mean, else 1


class MessageSizes(NamedTuple):
    """The sizes of messages."""

    alone: float  # an array of at least so many bytes is a message of its own
    most: float  # the most bytes of a message of several arrays, in the dtype in which they are combined
    enough: float  # a message of more bytes than that takes no further array


def pack(op: Op, key: Key, size: int, limits: dict[np.dtype, MessageSizes]) -> tuple[Message, ...]:
    """Divide a list of arrays over ``size`` replicas into messages, from the last on, whose gradient is ready first.

    Arrays without elements are left out. ``limits`` has the sizes of messages by the dtype of the arrays.
    """
    waiting: dict[np.dtype, list[int]] = {}
    packed: dict[np.dtype, int] = {}  # bytes in the dtype in which they are combined
    messages: list[Message] = []

    def close(dtype: np.dtype) -> None:
        messages.append(message_of(op, key, waiting.pop(dtype)[::-1], size))
        del packed[dtype]

    for i in reversed(range(len(key))):
        dtype, shape = key[i]
        itemsize = accumulator(dtype, op).itemsize
        alone, most, enough = limits[dtype]
        count = math.prod(shape)
        if count * dtype.itemsize >= alone or count * itemsize > most:
            messages.append(message_of(op, key, [i], size))
        elif count:
            if packed.get(dtype, 0) + count * itemsize > most:
                close(dtype)
            waiting.setdefault(dtype, []).append(i)
            packed[dtype] = packed.get(dtype, 0) + count * itemsize
            if packed[dtype] * dtype.itemsize > enough * itemsize:
                close(dtype)
    for dtype in list(waiting):
        close(dtype)
    return tuple(messages)


def message_of(op: Op, key: Key, members: Sequence[int], size: int) -> Message:
    """Return the message of arrays of one dtype, over ``size`` replicas. Raise TypeError if ``op`` cannot reduce it."""
    dtype = key[members[0]][0]
    wire, result = accumulator(dtype, op), result_dtype(dtype, op)
    runs, start = [], 0
    for shape, group in itertools.groupby(members, key=lambda i: key[i][1]):
        count = len(list(group))
        stop = start + count * math.prod(shape)
        runs.append(Run(slice(start, stop), count, shape))
        start = stop
    vectors = all(len(run.shape) == 1 for run in runs)
    ends = [*itertools.accumulate(math.prod(key[i][1]) for i in members)]
    return Message(
        tuple(members),
        tuple(runs),
        tuple(map(slice, [0, *ends], ends)) if vectors else (),
        start,
        0 if vectors else None,
        result if result == dtype else dtype,  # equal dtypes are one object, so that `is` compares them
        result if result == wire else wire,
        result,
        COMBINE[op],
        size if op is ReduceOp.MEAN else 1,
    )


def new_array(length: int, dtype: np.dtype) -> np.ndarray:
    """Return memory for a flat array. A large one reuses the memory of a former one without references."""
    return np.empty(length, dtype) if length <= SMALL else _results.empty((length,), dtype)


def join(message: Message, arrays: Sequence[np.ndarray], into: np.ndarray) -> None:
    """Copy the arrays of a message into one flat array of the host."""
    first, last = message.members[0], message.members[-1]
    if last - first + 1 == len(message.members):
        mine = arrays[first : last + 1]
    else:
        mine = [arrays[i] for i in message.members]
    np.concatenate(mine, message.axis, into)


def unpack(message: Message, total: np.ndarray, out: list[Any]) -> None:
    """Put views of a flat result into ``out`` at the indices of the message's members."""
    first, last = message.members[0], message.members[-1]
    views: Any = []
    if len(message.runs) == 1 and message.runs[0].shape:
        _, length, shape = message.runs[0]
        views = total.reshape(length, *shape)  # the iteration makes the views
    elif message.slices:
        views = map(total.__getitem__, message.slices)
    else:
        for where, length, shape in message.runs:
            part = total[where]
            if not shape:
                part = part.copy()  # a view of one number would keep the whole message in memory
                views.extend([part[i, ...] for i in range(length)])
            elif length == 1:
                views.append(part.reshape(shape))
            else:
                views.extend(part.reshape(length, *shape))
    if last - first + 1 == len(message.members):
        out[first : last + 1] = views
    else:
        for i, view in zip(message.members, views, strict=True):
            out[i] = view


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


def write_piece(piece: Piece, slot: np.ndarray) -> None:
    for where, part in piece:
        slot[where] = part


def read_piece(piece: Piece, slot: np.ndarray) -> None:
    for where, part in piece:
        part[...] = slot[where]
