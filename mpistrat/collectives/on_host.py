"""The all-reduce of arrays on the host, in few messages.

Small arrays of one dtype are joined in one message; a large array is a message of its own. A message is reduced piece
by piece.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat.collectives.algorithms.choose import Choice
from mpistrat.collectives.algorithms.contract import Algorithm
from mpistrat.collectives.arithmetic import dtypes
from mpistrat.collectives.arithmetic.operations import Op, finish
from mpistrat.collectives.packing import Key, Message, MessageSizes, join, message_of, new_array, pack, unpack
from mpistrat.collectives.reduction import FastPath, Reduction, Steps, short_steps, steps_alone
from mpistrat.record.layout import Kind
from mpistrat.record.ring import timed
from mpistrat.runtime.agreement.operation import Operation
from mpistrat.runtime.topology import Topology

_PACK_BYTES = 4 << 20  # of small arrays in one message
_BETWEEN_NODES = 16  # the cost of a message between nodes, relative to one inside a node
_join, _unpack = timed(Kind.REDUCE_PACK, join), timed(Kind.REDUCE_UNPACK, unpack)


class HostRoute(NamedTuple):
    """How a message is reduced: the algorithm, and the number of elements of a piece."""

    algorithm: Algorithm
    piece: int

    @classmethod
    def of(cls, choice: Choice, message: Message, name: str | None) -> HostRoute:
        itemsize = message.wire.itemsize
        algorithm, _, piece_bytes = choice.best(message.length * itemsize, message.wire, name)
        return cls(algorithm, max(1, piece_bytes // itemsize))


def reduction_of_arrays(
    topology: Topology, choice: Choice, op: Op, key: Key, bytes_per_pack: int, algorithm: str | None, form: Hashable
) -> Reduction:
    """Prepare the all-reduce of NumPy arrays of these dtypes and shapes. The ranks compare ``form``.

    Raise TypeError if ``op`` cannot reduce one of the arrays.
    """
    messages = packed_for_host(topology, choice, op, key, bytes_per_pack, algorithm)
    routes = [HostRoute.of(choice, each, algorithm) for each in messages]
    empty = [(i, dtypes.result(dtype, op)) for i, (dtype, shape) in enumerate(key) if not math.prod(shape)]

    def combine(arrays: Sequence[np.ndarray], timeout_seconds: float | None) -> list[Any]:
        out: list[Any] = [None] * len(arrays)
        for message, route in zip(messages, routes, strict=True):
            if len(message.members) == 1:
                i = message.members[0]
                out[i] = reduce_one(topology, message, route, arrays[i])
            else:
                _reduce_many(topology, message, route, arrays, out)
        for i, dtype in empty:
            out[i] = np.empty(arrays[i].shape, dtype)
        return out

    meets = bool(routes) and all(route.algorithm.meets for route in routes)
    steps = Steps(_as_they_are, combine, _as_they_are, meets)
    short = None
    if topology.size == 1:
        if all(dtypes.result(dtype, op) == dtype for dtype, _ in key):
            short = steps_alone()
    elif len(messages) == 1 and not empty:
        short = short_steps_of(topology, messages[0], routes[0])
    operation = Operation("all_reduce", op.name, key, form, bytes_per_pack or None, algorithm)
    return Reduction(topology, operation, steps, short)


def reduction_of_joined(
    topology: Topology, choice: Choice, op: Op, key: Key, out: np.ndarray, algorithm: str | None, form: Hashable
) -> Reduction | None:
    """Prepare the all-reduce of a list of NumPy arrays into one flat array, ``out``, which is the result of each run.

    For the ranks it is the operation of `reduction_of_arrays` of ``out``. If ``out`` is the only array of a run, it is
    combined where it is. Return None if the result has another dtype than the arrays.
    """
    joined = message_of(op, key, range(len(key)), topology.size)
    if joined.source is not joined.result:
        return None
    route = HostRoute.of(choice, joined, algorithm)

    def combine(arrays: Sequence[np.ndarray], timeout_seconds: float | None) -> list[np.ndarray]:
        if arrays[0] is not out:
            _join(joined, arrays, out)
        _reduce_pieces(topology, joined, route, out, out)
        return [out]

    short = None if topology.size == 1 else short_steps_of(topology, joined, route, out)
    operation = Operation("all_reduce", op.name, ((out.dtype, out.shape),), form, None, algorithm)
    return Reduction(topology, operation, Steps(_as_they_are, combine, _as_they_are, route.algorithm.meets), short)


def packed_for_host(
    topology: Topology, choice: Choice, op: Op, key: Key, bytes_per_pack: int, algorithm: str | None
) -> tuple[Message, ...]:
    """Return the messages of arrays of these dtypes and shapes. Raise TypeError if ``op`` cannot reduce one of them."""
    of_dtypes = {
        dtype: _limits(topology, choice, dtypes.accumulator(dtype, op), bytes_per_pack, algorithm)
        for dtype in {dtype: None for dtype, _ in key}
    }
    return pack(op, key, topology.size, of_dtypes)


def _limits(
    topology: Topology, choice: Choice, wire: np.dtype, bytes_per_pack: int, algorithm: str | None
) -> MessageSizes:
    between_nodes = len(topology.nodes) > 1
    alone = topology.limits.alone_bytes * (_BETWEEN_NODES if between_nodes else 1)
    if bytes_per_pack:
        return MessageSizes(max(alone, bytes_per_pack), math.inf, bytes_per_pack)
    if between_nodes:
        return MessageSizes(alone, _PACK_BYTES * 2, math.inf)
    return MessageSizes(alone, min(_PACK_BYTES, choice.piece_bytes(wire, algorithm)), math.inf)


def _as_they_are(arrays: Any) -> Any:
    return arrays


def joined(message: Message, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return a copy of the arrays of a message, in the dtype in which they are combined."""
    flat = new_array(message.length, message.wire)
    _join(message, arrays, flat)
    return flat


def reduce_one(topology: Topology, message: Message, route: HostRoute, array: np.ndarray) -> np.ndarray:
    """Return a new array with the reduction of one array, the only one of its message."""
    total = new_array(message.length, message.result)
    if not array.flags.c_contiguous:
        array = array.copy(order="C")
    _reduce_pieces(topology, message, route, array if array.ndim == 1 else array.reshape(-1), total)
    return total if array.ndim == 1 else total.reshape(array.shape)


def _reduce_many(
    topology: Topology, message: Message, route: HostRoute, arrays: Sequence[np.ndarray], out: list[Any]
) -> None:
    total = new_array(message.length, message.result)
    send = total if message.source is message.result else np.empty(message.length, message.source)
    _join(message, arrays, send)
    _reduce_pieces(topology, message, route, send, total)
    _unpack(message, total, out)


def _reduce_pieces(topology: Topology, message: Message, route: HostRoute, send: np.ndarray, total: np.ndarray) -> None:
    """Reduce a flat message piece by piece; ``total`` may be ``send``."""
    if message.length <= route.piece:
        reduce_piece(topology, message, route.algorithm, send, total)
        return
    for start in range(0, message.length, route.piece):
        part = slice(start, start + route.piece)
        piece = total[part]
        mine = piece if send is total else send[part]
        reduce_piece(topology, message, route.algorithm, mine, piece)


def reduce_piece(
    topology: Topology, message: Message, algorithm: Algorithm, send: np.ndarray, total: np.ndarray
) -> None:
    """Reduce a part of a message, and write the result in its own dtype; ``total`` may be ``send``."""
    if message.wire is message.result and message.divisor == 1:
        algorithm.reduce(topology, message.combine, send, total)
        return
    wide = total if message.wire is message.result else np.empty(len(total), message.wire)
    algorithm.reduce(topology, message.combine, send, wide)
    finish(wide, message.divisor, total)


def short_steps_of(
    topology: Topology, message: Message, route: HostRoute, out: np.ndarray | None = None
) -> FastPath | None:
    """Return the short steps of a message; None if its algorithm does not have them for this length and dtype."""
    if message.length > route.piece or not message.source is message.wire is message.result:
        return None
    return short_steps(topology, message, route.algorithm, out)
