"""One all-reduce, prepared once for the dtypes, shapes and places of its values, and then run for many values.

`Reduction.run` is the one place where a rank packs its values, meets the other ranks, and takes the result. These steps
depend on the kind of values, and each kind has its constructor: here for arrays on the host, in ``arena`` for buffers
in place, in ``gpu.all_reduce`` for arrays on a GPU, and in ``asynchronous``.

Small arrays of one dtype are joined in one message; a large array is a message of its own. How a list is packed depends
on dtypes and shapes only, so that the ranks agree on it without a message.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple

import numpy as np

from mpistrat.collectives.algorithms.choose import Choice
from mpistrat.collectives.algorithms.contract import Algorithm
from mpistrat.collectives.operations import COMBINE, Op, accumulator, divide, finish, result_dtype
from mpistrat.memory.buffer_pool import Buffers
from mpistrat.process.cache import Cache
from mpistrat.record import ring as trace
from mpistrat.record.layout import Kind
from mpistrat.record.ring import timed
from mpistrat.runtime.agreement.collective_lock import BROKEN, FREE, collective_call
from mpistrat.runtime.agreement.operation import Operation
from mpistrat.runtime.topology import Slot, Topology
from mpistrat.values import ReduceOp

# New memory costs a page fault for every 4 KiB of a result, which takes longer than the sum. A training step has as
# many results as gradients, so their memory is reused.
_results = Buffers()
SMALL = 4096  # elements; up to this length new memory is cheaper than the buffer pool

Key = tuple[tuple[np.dtype, tuple[int, ...]], ...]


class Run(NamedTuple):
    """Arrays of one shape that follow each other in a message."""

    span: slice
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


def packed_messages(op: Op, key: Key, size: int, limits: dict[np.dtype, MessageSizes]) -> tuple[Message, ...]:
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
        members = arrays[first : last + 1]
    else:
        members = [arrays[i] for i in message.members]
    np.concatenate(members, message.axis, into)


def unpack_message(message: Message, total: np.ndarray, out: list[Any]) -> None:
    """Put views of a flat result into ``out`` at the indices of the message's members."""
    first, last = message.members[0], message.members[-1]
    views: Any = []
    if len(message.runs) == 1 and message.runs[0].shape:
        _, length, shape = message.runs[0]
        views = total.reshape(length, *shape)  # the iteration makes the views
    elif message.slices:
        views = map(total.__getitem__, message.slices)
    else:
        for span, length, shape in message.runs:
            part = total[span]
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
    for span, part in piece:
        slot[span] = part


def read_piece(piece: Piece, slot: np.ndarray) -> None:
    for span, part in piece:
        part[...] = slot[span]


# --- prepared reductions --------------------------------------------------------


_MOST = 1024  # reductions that are kept
_target = weakref.ref.__call__  # a method of C, for `map`


class Steps(NamedTuple):
    """The steps of a rank in an all-reduce."""

    # gets the values, and returns what `combine` gets: messages, for example. Does not communicate.
    pack_values: Callable[[Sequence[Any]], Any]
    # gets the packed values and the limit of the call in seconds. Lets an algorithm combine the messages of all ranks,
    # divides for a mean, and returns what `unpack_values` gets.
    combine: Callable[[Any, float | None], Any]
    # gets the combined messages, and returns the results in the order of the values. Does not communicate.
    unpack_values: Callable[[Any], Any]
    meets: bool  # whether `combine` calls `CollectiveLock.meet` before it communicates in any other way


class FastPath(NamedTuple):
    """The steps of a small all-reduce, most of whose time is Python calls. See `Steps`."""

    # gets the values and the token of the meeting. Writes the values to memory that other ranks read, waits for all
    # ranks, combines the values of all, divides for a mean, and returns the results; None if the ranks gave different
    # tokens.
    exchange: Callable[[Sequence[Any], int], Any]
    # waits for all ranks where `exchange` writes, after its meeting, to memory that other ranks read. Gets a token;
    # returns whether all ranks gave the same token.
    meet_again: Callable[[int], bool] | None = None


def single_rank_path() -> FastPath:
    """Return the steps on one rank: the results are copies. They enter 2 functions of Python, the general ones 15."""

    def copies(values: Sequence[np.ndarray], token: int) -> list[Any]:
        return [value.copy() if value.size <= SMALL else _copied(value) for value in values]

    return FastPath(copies)


def _copied(value: np.ndarray) -> np.ndarray:
    copy = new_array(value.size, value.dtype).reshape(value.shape)
    copy[...] = value
    return copy


def fast_path_of(
    topology: Topology, message: Message, route: HostRoute, out: np.ndarray | None = None
) -> FastPath | None:
    """Return the steps of arrays that are one message, and whose ranks meet once.

    Return None if the algorithm does not have such steps for this length and dtype.

    With ``out``, a flat array, it is the result. Barriers and sums are as in the general steps, which take several
    microseconds more.
    """
    memory, ignoring_float_errors = topology.memory, topology.lock.ignoring_float_errors
    if memory is None:  # the ranks do not share it, or the communicator was freed
        return None
    if message.length > route.piece or not message.source is message.wire is message.result:
        return None
    meeting = route.algorithm.meeting(topology, message.combine, message.result, message.length)
    if meeting is None:
        return None
    slots, meet, take = meeting
    length, dtype, divisor, axis = message.length, message.result, message.divisor, message.axis
    shape = message.runs[0].shape if len(message.members) == 1 and out is None else None
    if shape is not None:
        slots = [slot.reshape(shape) for slot in slots]
    new = np.empty if length <= SMALL else new_array
    is_flat = shape is not None and len(shape) == 1

    def exchange(values: Sequence[np.ndarray], token: int) -> list[Any] | None:
        slot = slots[memory.generation]
        if shape is None:
            np.concatenate(values, axis, slot)
        else:
            slot[...] = values[0]
        if not meet(token):
            return None
        total = new(length, dtype) if out is None else out
        # The meeting has switched to the other generation of slots.
        ignoring_float_errors(take[memory.generation ^ 1], out=total)
        if divisor != 1:
            ignoring_float_errors(divide, total, divisor, total)
        if is_flat or total is out:
            return [total]
        if shape is not None:
            return [total.reshape(shape)]
        results: list[Any] = [None] * len(values)
        unpack_message(message, total, results)
        return results

    return FastPath(exchange)


class Reduction:
    """A prepared all-reduce. The ranks compare the description ``operation``.

    ``fast_path`` replaces ``steps`` in calls without a limit or a trace. ``only_for`` has the objects that it was
    prepared for, if it is for these alone.
    """

    __slots__ = ("_exchange", "_meet_again", "_only_for", "_operation", "_steps", "_topology")

    def __init__(
        self,
        topology: Topology,
        operation: Operation,
        steps: Steps,
        fast_path: FastPath | None = None,
        only_for: tuple[weakref.ref[Any], ...] = (),
    ):
        self._topology = topology
        self._operation = operation
        self._steps = steps
        self._only_for = only_for
        # The lines of calls are compared by `CollectiveLock.collective` alone, which the fast path does not enter.
        fast_path = None if topology.lock.compares_lines else fast_path
        self._exchange = None if fast_path is None else fast_path.exchange
        self._meet_again = None if fast_path is None else fast_path.meet_again

    def __deepcopy__(self, memo: dict[int, Any]) -> Reduction:
        return self  # it belongs to the ranks, which are not copied

    def is_for(self, values: Sequence[Any]) -> bool:
        """Return whether a reduction of certain objects was prepared for these."""
        return len(values) == len(self._only_for) and all(map(is_, map(_target, self._only_for), values))

    def sample(self, shares: Any) -> Any:
        """Return what takes the values of each replica of ``shares`` before the next run; None without a check."""
        return None

    def run(self, values: Sequence[Any], timeout_seconds: float | None = None) -> Any:
        """Return the reductions of the values over all ranks. Raise as `CollectiveLock.collective`."""
        exchange = self._exchange
        if exchange is None or timeout_seconds is not None or trace.ring is not None:
            return self._run(values, timeout_seconds)
        lock = self._topology.lock
        token = lock.begin(self._operation)
        try:
            out = exchange(values, token)
            if out is None or (self._meet_again is not None and not self._meet_again(lock.next_token(token, 1))):
                lock.disagree(self._operation)
            if lock.flight is not None:  # as `end`, without a call
                lock.flight.leave()
            lock.state = FREE
            return out
        except BaseException as error:
            lock.state = BROKEN  # before a call: a signal handler may raise where a function begins
            lock.failed(error)
            raise

    @collective_call(attrgetter("_topology"), "all_reduce")
    def _run(self, values: Sequence[Any], timeout_seconds: float | None) -> Any:
        topology = self._topology
        pack_values, combine, unpack_values, meets = self._steps
        state = pack_values(values)
        with topology.lock.collective(self._operation, meets, timeout_seconds):
            done = topology.lock.ignoring_float_errors(combine, state, timeout_seconds)
        return unpack_values(done)


class Reductions(dict[float | None, Cache[Hashable, Reduction]], Slot):
    """The prepared reductions of a topology: for each limit of its calls, by what they were prepared for.

    ``kind`` is the class of new ones: layers above replace it, so that a reduction without a check has no branch for
    it.
    """

    kind: type[Reduction] = Reduction

    def close(self) -> None:
        for cache in self.values():  # which the ops of strategies have too
            cache.clear()
        self.clear()


def new_reduction(topology: Topology, *args: Any, **kwargs: Any) -> Reduction:
    """Return a new `Reduction` of the class that these ranks use."""
    return topology.slot(Reductions).kind(topology, *args, **kwargs)


def prepared(topology: Topology) -> Cache[Hashable, Reduction]:
    """Return the cache of the reductions that were prepared for these ranks."""
    return topology.slot(Reductions).setdefault(topology.lock.timeout_seconds, Cache(_MOST))


# --- arrays on the host ---------------------------------------------------------


_PACK_BYTES = 4 << 20  # of small arrays in one message
_BETWEEN_NODES = 16  # the cost of a message between nodes, relative to one inside a node
_join, _unpack = timed(Kind.REDUCE_PACK, join), timed(Kind.REDUCE_UNPACK, unpack_message)


class HostRoute(NamedTuple):
    """The reduction of a message on the host: the algorithm, and the number of elements of a piece."""

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
    routes = [HostRoute.of(choice, message, algorithm) for message in messages]
    empty = [(i, result_dtype(dtype, op)) for i, (dtype, shape) in enumerate(key) if not math.prod(shape)]

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
    steps = Steps(as_they_are, combine, as_they_are, meets)
    fast_path = None
    if topology.size == 1:
        if all(result_dtype(dtype, op) == dtype for dtype, _ in key):
            fast_path = single_rank_path()
    elif len(messages) == 1 and not empty:
        fast_path = fast_path_of(topology, messages[0], routes[0])
    operation = Operation("all_reduce", op.name, key, form, bytes_per_pack or None, algorithm)
    return new_reduction(topology, operation, steps, fast_path)


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

    fast_path = None if topology.size == 1 else fast_path_of(topology, joined, route, out)
    operation = Operation("all_reduce", op.name, ((out.dtype, out.shape),), form, None, algorithm)
    steps = Steps(as_they_are, combine, as_they_are, route.algorithm.meets)
    return new_reduction(topology, operation, steps, fast_path)


def packed_for_host(
    topology: Topology, choice: Choice, op: Op, key: Key, bytes_per_pack: int, algorithm: str | None
) -> tuple[Message, ...]:
    """Return the messages of arrays of these dtypes and shapes. Raise TypeError if ``op`` cannot reduce one of them."""
    of_dtypes = {
        dtype: _sizes_of(topology, choice, accumulator(dtype, op), bytes_per_pack, algorithm)
        for dtype in {dtype: None for dtype, _ in key}
    }
    return packed_messages(op, key, topology.size, of_dtypes)


def _sizes_of(
    topology: Topology, choice: Choice, wire: np.dtype, bytes_per_pack: int, algorithm: str | None
) -> MessageSizes:
    between_nodes = len(topology.nodes) > 1
    alone = topology.limits.alone_bytes * (_BETWEEN_NODES if between_nodes else 1)
    if bytes_per_pack:
        return MessageSizes(max(alone, bytes_per_pack), math.inf, bytes_per_pack)
    if between_nodes:
        return MessageSizes(alone, _PACK_BYTES * 2, math.inf)
    return MessageSizes(alone, min(_PACK_BYTES, choice.piece_bytes(wire, algorithm)), math.inf)


def as_they_are(arrays: Any) -> Any:
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
        source = piece if send is total else send[part]
        reduce_piece(topology, message, route.algorithm, source, piece)


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
