"""Messages between the ranks of a communicator, sent without waiting and received in order, and their functions."""

from __future__ import annotations

import itertools
import pickle
import struct
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import xxhash

from mpistrat.memory.buffer_pool import Buffers
from mpistrat.messages.pickling import EMPTY, Failure, Losses, Packed, failure_of, pack, packed_function, unpack
from mpistrat.process import mpi
from mpistrat.process.waiting import Backoff

REQUEST, REPLY = 1, 3  # tags; the memory of large arrays has the next one
_HEADER = struct.Struct("<IIB")
_LENGTH = struct.Struct("<Q")
_PIECE = 8 << 20  # bytes of a message at most: an MPI library without a thread moves on when it is called
_LARGEST_STREAM = 1 << 28
_GROUPS = 1 << 15  # tags that every MPI library has
_memory = Buffers()  # page faults of new memory would take longer than its bytes


class ReceivedMessage(NamedTuple):
    """A message that arrived."""

    source: int  # the rank that sent it
    kind: str  # what it asks for, or tells
    head: tuple[Any, ...]  # small facts
    body: Packed  # an object that is not unpacked yet


class _Depth(threading.local):
    depth = 0


class _Guard:
    """A context in which a message is sent or received. If an exception leaves it, a message may be lost.

    A class, because contexts of `contextlib` take 2 us longer, at eight for each task.
    """

    __slots__ = ("_broken", "_lock", "_of_thread", "_rank")

    def __init__(self, lock: threading.RLock, rank: int):
        self._lock, self._rank = lock, rank
        self._broken = False
        self._of_thread = _Depth()

    @property
    def entered(self) -> bool:
        """Whether this thread is in such a context, or about to be."""
        return self._of_thread.depth > 0

    def __enter__(self) -> None:
        self._of_thread.depth += 1  # first: a signal handler that asks must not raise while the lock is held
        self._lock.acquire()
        if self._broken:
            self._lock.release()
            self._of_thread.depth -= 1
            raise RuntimeError(
                f"rank {self._rank}: an earlier message was interrupted, so no more can be sent: end the program"
            )

    def __exit__(self, kind: object, *_: object) -> None:
        self._broken |= kind is not None
        self._lock.release()
        self._of_thread.depth -= 1


class Mailbox:
    """The messages of one rank, in a communicator that nothing else uses.

    Messages from one rank with one tag arrive in order. Several threads may call if MPI allows it: ``lock`` is held
    during each call. Messages to and from a lost rank are dropped as soon as receiving notes its loss.
    ``closed`` says whether the other ranks have been told that no more messages come.
    """

    def __init__(self, comm: Any, name: Callable[[int], str] = "rank {}".format):
        self._comm = comm
        self.losses = Losses(comm, name)
        self.rank, self.size = comm.rank, comm.size
        self.lock = threading.RLock()
        self._guard = _Guard(self.lock, self.rank)
        self.closed = False
        self._numbers = itertools.count()
        self._awaited: set[int] = set()  # numbers of the requests without a reply
        self._sends: deque[tuple[int, list[Any], Any]] = deque()
        self._undelivered: list[tuple[int, list[Any], Any]] = []  # to lost ranks; MPI may keep their memory
        self._unfinished: list[tuple[Any, memoryview]] = []  # MPI may still write to them after an error
        self._moves = 0  # messages of waiting messages that have left
        self._mpi = mpi.start()
        self._status = self._mpi.Status()

    def send(self, to: int, kind: str, head: tuple[Any, ...] = (), body: Packed = EMPTY, tag: int = REQUEST) -> None:
        """Send a message without waiting. Large arrays of the body must not change before `flush` returns.

        Raise RuntimeError if ``closed``, or if an earlier message was interrupted.
        """
        self.require_open()
        stream, buffers, aside = body.stream, body.buffers, len(body.stream) > _LARGEST_STREAM
        if aside:
            stream, buffers = b"", (stream, *buffers)
        facts = pickle.dumps((kind, head), 5)
        lengths = [_LENGTH.pack(memoryview(buffer).nbytes) for buffer in buffers]
        frame = b"".join([_HEADER.pack(len(facts), len(buffers), aside), *lengths, facts, stream])
        byte = self._mpi.BYTE
        with self._guard:
            if to in self.losses.ranks:
                return
            requests: list[Any] = []
            try:
                requests.append(self._comm.Isend([frame, byte], to, tag))
                for buffer in buffers:
                    requests += [self._comm.Isend([piece, byte], to, tag + 1) for piece in _pieces(buffer)]
                sent = len(requests) == 1 and requests[0].Test()
            except self._mpi.Exception as error:
                self.losses.note(error)
                sent = False
            if not sent:
                self._sends.append((to, requests, (frame, buffers)))

    def require_open(self) -> None:
        """Raise RuntimeError if the other ranks have been told that no more messages come."""
        if self.closed:
            raise RuntimeError(
                f"rank {self.rank} has let the other ranks go, because its program ends: read variables and fetch "
                "results before the end"
            )

    def require(self, rank: int) -> None:
        """Raise the error of a call that needs a rank, but sends it nothing, if it is lost or the mailbox is closed."""
        self.require_open()
        if self.losses.survived:
            with self._guard:
                try:
                    self._comm.Iprobe(rank, REPLY)
                except self._mpi.Exception as error:
                    self.losses.note(error)
            if rank in self.losses.ranks:
                raise self.losses.error(rank)

    def receive(self, tag: int = REQUEST) -> ReceivedMessage | None:
        """Return the next message, or None if none has arrived."""
        with self._guard:
            if self._sends:
                self._forget_sent()
            if self._awaited and tag == REQUEST:
                self._next_reply()  # to a request that was interrupted: a large one holds its sender
            try:
                arrived = self._arrived(tag)
            except self._mpi.Exception as error:
                self.losses.note(error)
                return None
            if arrived is None or arrived[0] in self.losses.ranks:
                return None
        origin, frame, buffers = arrived
        size, count, aside = _HEADER.unpack_from(frame)
        start = _HEADER.size + count * _LENGTH.size
        view = memoryview(frame)
        kind, head = pickle.loads(view[start : start + size])
        stream = buffers.pop(0) if aside else view[start + size :]
        return ReceivedMessage(origin, kind, head, Packed(stream, tuple(buffers)))

    def _arrived(self, tag: int) -> tuple[int, bytearray, list[Any]] | None:
        """Return the source, the frame and the arrays of the next message, or None if none has arrived."""
        status = self._status
        message = self._comm.Improbe(self._mpi.ANY_SOURCE, tag, status)
        if message is None:
            return None
        origin = status.Get_source()
        frame = bytearray(status.Get_count(self._mpi.BYTE))
        message.Recv([frame, self._mpi.BYTE])
        _, count, _ = _HEADER.unpack_from(frame)
        if not count:
            return origin, frame, []
        lengths = [_LENGTH.unpack_from(frame, _HEADER.size + i * _LENGTH.size)[0] for i in range(count)]
        buffers = [_memory.empty((nbytes,), np.uint8) for nbytes in lengths]
        self._receive_into(buffers, origin, tag + 1)
        return origin, frame, buffers

    def _receive_into(self, buffers: list[Any], origin: int, tag: int) -> None:
        """Receive arrays. All messages are asked for at once: each would wait a round trip for the one before it."""
        pieces = [piece for buffer in buffers for piece in _pieces(buffer)]
        arriving: list[tuple[Any, memoryview]] = []
        try:
            arriving.extend((self._comm.Irecv([piece, self._mpi.BYTE], origin, tag), piece) for piece in pieces)
            for request, _ in arriving:  # one by one, because Waitall does not name a lost rank
                request.Wait()
        except BaseException:
            self._unfinished += arriving
            raise

    def ask(self, to: int, kind: str, head: tuple[Any, ...] = (), body: Packed = EMPTY) -> Any:
        """Return the value of the reply to a request. Raise the other rank's error, or LostRankError if it is lost."""
        (value,) = self.ask_all([(to, kind, head, body)])
        return value

    def ask_all(self, requests: Sequence[tuple[int, str, tuple[Any, ...], Packed]]) -> list[Any]:
        """Send requests, and return the values of their replies. The first error is raised after all have come."""
        with self.lock:
            numbers: dict[int, int] = {}
            for to, kind, head, body in requests:
                number = next(self._numbers)
                numbers[number] = to
                self._awaited.add(number)
                self.send(to, kind, (number, *head), body)
            arrived = self._replies(numbers)
        replies = [arrived[number] for number in numbers]
        values = [unpack(reply.body) for reply in replies]
        for reply, value in zip(replies, values, strict=True):
            if reply.kind == "error":
                raise value.error()
        return values

    def _replies(self, numbers: dict[int, int]) -> dict[int, ReceivedMessage]:
        """Return the replies to requests, of which ``numbers`` has the ranks, received in the order of arrival.

        A large reply holds its sender. In another order, two ranks that ask two servers could wait for each other.
        """
        replies: dict[int, ReceivedMessage] = {}
        missing, backoff, moves = dict(numbers), Backoff(), self._moves
        while missing:
            message = self._next_reply()
            if message is None:
                if self.losses.ranks:
                    self._require(missing)
                moves = self._pause(backoff, moves)
            elif message.head[0] in missing:  # any other one answers a request that was interrupted
                del missing[message.head[0]]
                replies[message.head[0]] = message
        return replies

    def _require(self, missing: dict[int, int]) -> None:
        """Raise LostRankError if a rank is lost of which a reply is missing."""
        lost = {number: rank for number, rank in missing.items() if rank in self.losses.ranks}
        self._awaited.difference_update(lost)
        for rank in lost.values():
            raise self.losses.error(rank)

    def _next_reply(self) -> ReceivedMessage | None:
        message = self.receive(REPLY)
        if message is not None:
            self._awaited.discard(message.head[0])
        return message

    def answer(self, message: ReceivedMessage, value: Any) -> None:
        """Send the value that a request asked for, and wait until its arrays may change."""
        self.reply(message, pack(value)[0])

    def reply(self, message: ReceivedMessage, body: Packed) -> None:
        """Send a packed value that a request asked for, and wait until its arrays may change."""
        self.send(message.source, "value", message.head[:1], body, REPLY)
        self.flush()

    def refuse(self, message: ReceivedMessage, error: BaseException, where: str) -> None:
        failure: Failure = failure_of(error, where)
        self.send(message.source, "error", message.head[:1], pack(failure)[0], REPLY)

    def communicator(self, ranks: tuple[int, ...], number: int) -> Any:
        """Return a communicator of some ranks. Collective over these, which give the same number."""
        group = self._comm.Get_group()
        subgroup = group.Incl(ranks)
        try:
            return self._comm.Create_group(subgroup, number % _GROUPS)
        finally:
            subgroup.Free()
            group.Free()

    @property
    def between_messages(self) -> bool:
        """Whether this thread is outside of a message, so that an exception loses none."""
        return not self._guard.entered

    def close(self) -> None:
        """Free the communicator. Collective, after `contact.shut_down`. With lost ranks it is kept."""
        if not mpi.survives_losses():
            self._comm.Free()

    def flush(self) -> None:
        """Wait until all messages have left, so that their arrays may change."""
        backoff, moves = Backoff(), self._moves
        while self._sends:
            with self.lock:
                self._forget_sent()
            if self._sends:
                moves = self._pause(backoff, moves)

    def _pause(self, backoff: Backoff, moves: int) -> int:
        """Pause before the next poll, shortly if messages have left since ``moves``, and return their number.

        Each message of a large message waits for a call of MPI. A rank that sleeps between two holds the next.
        """
        if self._moves != moves:
            backoff.reset()
        backoff.pause()
        return self._moves

    def _forget_sent(self) -> None:
        while self._sends:
            to, requests, _ = self._sends[0]
            lost = to in self.losses.ranks
            completed = 0
            if not lost:
                try:  # one by one: an error of Testsome says only that one of them has one (MPI_ERR_IN_STATUS)
                    completed = sum(request.Test() for request in requests if request)
                except self._mpi.Exception as error:
                    self.losses.note(error)
                    return
            if lost or not any(requests):
                sent = self._sends.popleft()
                if lost:
                    self._undelivered.append(sent)
            elif not completed:
                return
            else:
                self._moves += completed


def _pieces(buffer: Any) -> list[memoryview]:
    view = memoryview(buffer).cast("B")
    return [view[start : start + _PIECE] for start in range(0, view.nbytes, _PIECE)]


# --- several requests to one rank as one message, and their outcomes as one reply -------------------------

SEVERAL = "several"  # kind of such a message

Request = tuple[int, str, tuple[Any, ...], Packed]  # rank, kind, head, body


def ask_in_bundles(mailbox: Mailbox, requests: Sequence[Request]) -> list[Any]:
    """Return the replies to requests, with one message to each rank, which does what one asks for before the next.

    The first error is raised after all have come.
    """
    by_rank: dict[int, list[int]] = {}
    for index, (to, *_) in enumerate(requests):
        by_rank.setdefault(to, []).append(index)
    if len(by_rank) == len(requests):
        return mailbox.ask_all(requests)
    replies: list[Any] = [None] * len(requests)
    messages = [(to, SEVERAL, (), bundle([requests[i][1:] for i in indices])) for to, indices in by_rank.items()]
    for indices, outcomes in zip(by_rank.values(), mailbox.ask_all(messages), strict=True):
        for index, (_, _, body) in zip(indices, outcomes, strict=True):
            replies[index] = unpack(body)
    for reply in replies:
        if isinstance(reply, Failure):
            raise reply.error()
    return replies


def outcomes_of(message: ReceivedMessage, outcome: Callable[[ReceivedMessage], Packed]) -> Packed:
    """Return the reply to a message of several requests. ``outcome`` packs the value, or `Failure`, of each."""
    outcomes = []
    for kind, head, body in unpack(message.body):
        outcomes.append((kind, (), outcome(ReceivedMessage(message.source, kind, (*message.head, *head), body))))
    return bundle(outcomes)


def bundle(parts: Sequence[tuple[Any, tuple[Any, ...], Packed]]) -> Packed:
    """Return (name, facts, packed object) of several objects as one body, whose arrays are not copied."""
    buffers: list[pickle.PickleBuffer] = []
    wrapped = [
        (kind, head, Packed(body.stream, tuple(map(pickle.PickleBuffer, body.buffers)))) for kind, head, body in parts
    ]
    stream = pickle.dumps(wrapped, 5, buffer_callback=buffers.append)
    return Packed(stream, tuple(buffer.raw() for buffer in buffers))


# --- functions that are sent to a rank once, and named by their digest from then on -----------------------

_MOST = 256  # functions that a rank keeps for another one


class SentFunction(NamedTuple):
    """A function as bytes."""

    digest: bytes  # the name of the function
    packed: Packed
    # the objects that exist once and that it refers to. They must live as long as it may run.
    references: list[Any]


class FunctionSender:
    """The functions that this rank has sent, and where each one is known."""

    def __init__(self, mailbox: Mailbox):
        self._mailbox = mailbox
        self._packed: weakref.WeakKeyDictionary[FunctionType, SentFunction] = weakref.WeakKeyDictionary()
        self._known: dict[int, OrderedDict[bytes, None]] = {}

    def packed(self, function: Any) -> SentFunction:
        """Return a function as bytes. A plain one is packed at its first use, with the values that it captures then.

        Methods and other callables are packed at each use. Raise TypeError that names what cannot be sent.
        """
        plain = isinstance(function, FunctionType)
        if plain and (known := self._packed.get(function)) is not None:
            return known
        packed, references = packed_function(function, copy=True)
        digest = xxhash.xxh3_128()
        for field in packed:
            for data in [field] if field is packed.stream else field:
                digest.update(data)
        sent = SentFunction(digest.digest(), packed, references)
        if plain:
            self._packed[function] = sent
        return sent

    def send(self, to: int, function: SentFunction) -> None:
        """Send a function to a rank that does not know it."""
        known = self._known.setdefault(to, OrderedDict())
        if function.digest in known:
            known.move_to_end(function.digest)
            return
        forget = known.popitem(last=False)[0] if len(known) >= _MOST else None
        known[function.digest] = None
        self._mailbox.send(to, "function", (function.digest, forget), function.packed)


class FunctionKeeper:
    """The functions that other ranks have sent to this one."""

    def __init__(self) -> None:
        self._functions: dict[tuple[int, bytes], Packed | Any] = {}

    def keep(self, message: ReceivedMessage) -> None:
        digest, forget = message.head
        if forget is not None:
            self._functions.pop((message.source, forget), None)
        self._functions[message.source, digest] = message.body

    def function(self, source: int, digest: bytes) -> Any:
        """Return a function, which is unpacked at its first use."""
        function = self._functions[source, digest]
        if isinstance(function, Packed):
            function = self._functions[source, digest] = unpack(function)
        return function
