"""The packing of arrays on a GPU into few messages: copies are cheap there, and each message costs its latency."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mpistrat.arrays.device import cupy_for
from mpistrat.arrays.gpu import kernels
from mpistrat.collectives.arithmetic.operations import Op
from mpistrat.collectives.packing import Key, Message, MessageSizes, pack

PACK_BYTES = 64 << 20  # of a message of several arrays
_ALONE_BYTES = 8 << 20  # a larger array is a message of its own
_SMALL = 1 << 10  # elements; of a longer message a number is copied: a view would keep it all


class Laid(NamedTuple):
    """A message on the GPU: the flat array to send and the one for its reduction, of one length; may be the same."""

    message: Message
    send: Any
    total: Any


def packed_for_gpu(op: Op, key: Key, size: int, bytes_per_pack: int = 0) -> tuple[Message, ...]:
    """Return the messages of arrays of these dtypes and shapes.

    Raise TypeError if one of the arrays cannot be reduced by ``op``.
    """
    limits = MessageSizes(_ALONE_BYTES, math.inf, bytes_per_pack or PACK_BYTES)
    return pack(op, key, size, {dtype: limits for dtype, _ in key})


def lay_down(message: Message, arrays: Sequence[Any]) -> Laid:
    """Return the arrays of a message as one, copied in one launch, and memory for the result.

    A single array is not copied.
    """
    cupy = cupy_for("an array on a GPU")
    mine = [cupy.ascontiguousarray(arrays[i]) for i in message.members]
    if len(mine) == 1:
        send = mine[0].reshape(-1)
    else:
        send = cupy.empty(message.length, message.source)
        kernels.copy_each(mine, [send[where] for where, _ in _places(message)])
    return Laid(message, send, cupy.empty(message.length, message.result))


def unpack(laid: Laid, out: list[Any]) -> None:
    """Put views of a flat result into ``out`` at the indices of the message's members."""
    message = laid.message
    for i, (where, shape) in zip(message.members, _places(message), strict=True):
        part = laid.total[where].reshape(shape)
        out[i] = part.copy() if part.size == 1 and message.length > _SMALL else part


def widened(laid: Laid) -> Any:
    """Return the message in the dtype in which it is combined; a copy if that is another dtype."""
    wire = laid.message.wire
    return laid.send if laid.send.dtype == wire else laid.send.astype(wire)


def _places(message: Message) -> Iterator[tuple[slice, tuple[int, ...]]]:
    """Yield the place of each array in a message, and its shape."""
    for where, _, shape in message.runs:
        for start, stop in itertools.pairwise(range(where.start, where.stop + 1, math.prod(shape))):
            yield slice(start, stop), shape
