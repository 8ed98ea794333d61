"""Writes that count once: a worker keeps the writes of a function, and servers prepare them until the commit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpistrat import context, nest
from mpistrat.messages.mailbox import Mailbox, ReceivedMessage, SentFunction, bundle
from mpistrat.messages.pickling import EMPTY, Packed, failure_of, pack, unpack
from mpistrat.messages.servers import Request, Servers, Update
from mpistrat.representation import grouped
from mpistrat.variables.on_server import ServerVariable, VariableStore, known


class Write(NamedTuple):
    """A write to the variable ``key``, as it is sent: a method of `HeldVariable` with its value, or None, and the
    digest of a function that updates the variable, with its arguments.
    """

    key: int
    method: str | None
    digest: bytes
    value: Packed


def pack_writes(writes: list[Write]) -> Packed:
    """Return writes as one body of a message, whose arrays are not copied."""
    return bundle([(key, (method, digest), value) for key, method, digest, value in writes])


def unpack_writes(body: Packed) -> list[Write]:
    """Return the writes of `pack_writes`."""
    return [Write(key, method, digest, value) for key, (method, digest), value in unpack(body)]


class PreparedWrites:
    """The writes of functions that have ended on a worker, until the coordinator decides.

    The worker sends the coordinator the result of a call when all servers have its writes. The coordinator then sends
    ``commit``, or ``abort`` if the worker was lost first. A number is applied once: it is dropped with its writes.
    """

    def __init__(self, store: VariableStore):
        self._store = store
        self._waiting: dict[int, list[Callable[[], object]]] = {}
        self._aborted: set[int] = set()  # numbers whose writes have not come, of lost workers

    def takes(self, kind: str) -> bool:
        """Return whether a message of this kind is for `handle`."""
        return kind in ("prepare", "commit", "abort")

    def handle(self, mailbox: Mailbox, message: ReceivedMessage, where: str) -> None:
        """Do what a message asks for, and answer it."""
        if message.kind == "prepare":
            self._prepare(mailbox, message, where)
        elif message.kind == "commit":
            (number,) = message.head
            with self._store.as_one():
                # Other ranks see all writes of the function, or none.
                body = self._apply(number, where)
            mailbox.send(message.source, "committed", (number,), body)
        elif self._waiting.pop(message.head[0], None) is None:
            # The abort has overtaken the writes.
            self._aborted.add(message.head[0])

    def _prepare(self, mailbox: Mailbox, message: ReceivedMessage, where: str) -> None:
        _, number = message.head
        if number in self._aborted:  # the worker was lost, and this arrived late
            self._aborted.discard(number)
            return
        writes = self._waiting[number] = []
        try:
            writes += [self._checked(write, message.source) for write in unpack_writes(message.body)]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the function raises it, and the coordinator says abort
            mailbox.refuse(message, error, where)
        else:
            mailbox.answer(message, None)

    def _checked(self, write: Write, source: int) -> Callable[[], object]:
        """Return the application of a write. Raise what it would raise, as far as that can be known."""
        value = unpack(write.value)
        if write.method is None:
            return self._store.prepared_update(write.key, self._store.function(source, write.digest), *value)
        self._store.held(write.key).check_write(write.method, value)
        return partial(self._store.write, write.key, write.method, value)

    def _apply(self, number: int, where: str) -> Packed:
        """Apply the writes of a number. Return the first error of an update function, as it is sent."""
        body: Packed = EMPTY
        for write in self._waiting.pop(number):
            try:
                write()
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                # The other writes are applied all the same: they are committed.
                body = pack(failure_of(error, where))[0] if body is EMPTY else body
        return body


class _KeptWrite(NamedTuple):
    """A write, with what is needed to apply it to copies of the variables."""

    write: Write
    variables: tuple[ServerVariable, ...]  # that it may read or change; the first one names the server
    function: Any  # that updates them
    kept: object  # what must live until the write is sent


class KeptWrites:
    """The writes of the function that runs.

    A variable that it has written is read from a copy, made at the first read, to which the writes have been applied.
    """

    def __init__(self, servers: Servers):
        self._servers = servers
        self._writes: list[_KeptWrite] = []
        self._unapplied: list[_KeptWrite] = []  # to the copies
        self._copies = VariableStore()
        self._lock = threading.RLock()  # a function may have threads

    def ask_all(self, requests: Sequence[Request]) -> list[Any]:
        """Return the replies to requests: of the parameter servers, or for own writes."""
        with self._lock:
            written = {variable.key for pending in self._writes for variable in pending.variables}
            replies: list[Any] = [None] * len(requests)
            others = []
            for i, (_, kind, (key, *head), value) in enumerate(requests):
                if kind == "write":
                    # Copied: the function may change the array after the write.
                    packed, references = pack(value, copy=True)
                    self._keep(_KeptWrite(Write(key, head[0], b"", packed), (known(key),), None, references))
                    written.add(key)
                elif key in written:
                    copy = self._own(key)
                    # A copy, which later writes do not change.
                    replies[i] = np.array(copy if kind == "read" else copy[value])
                else:
                    others.append(i)
            if others:
                answers = self._servers.ask_now([requests[i] for i in others])
                for i, answer in zip(others, answers, strict=True):
                    replies[i] = answer
            return replies

    def update(self, updates: Sequence[Update], functions: Sequence[SentFunction]) -> None:
        """Keep calls of functions that run beside their variables when the function has ended."""
        with self._lock:
            for (variable, function, args, kwargs), sent in zip(updates, functions, strict=True):
                packed, references = pack((args, kwargs), copy=True)
                leaves, _ = nest.flatten((args, kwargs))
                others = (leaf for leaf in leaves if isinstance(leaf, ServerVariable))
                variables = (known(variable.key), *others)
                write = Write(variable.key, None, sent.digest, packed)
                self._keep(_KeptWrite(write, variables, function, (references, sent)))

    def _keep(self, pending: _KeptWrite) -> None:
        self._writes.append(pending)
        self._unapplied.append(pending)

    def _own(self, key: int) -> np.ndarray:
        """Return the copy of a variable, after the writes that matter for it."""
        # Backwards: a write matters if it changes a variable that a later write which matters depends on.
        needed, due = {key}, []
        for pending in reversed(self._unapplied):
            keys = {variable.key for variable in pending.variables}
            if keys & needed:
                needed |= keys
                due.append(pending)
        for pending in reversed(due):
            self._apply(pending)
            self._unapplied.remove(pending)
        return self._copies.array(key)

    def _apply(self, pending: _KeptWrite) -> None:
        """Apply a write to the copies."""
        for variable in pending.variables:
            if not self._copies.holds(variable.key):
                (value,) = self._servers.ask_now([(variable.server, "read", (variable.key,), None)])
                self._copies.hold(variable, value)
        write = pending.write
        buffers = tuple(map(bytearray, write.value.buffers))  # the function may change its arguments
        value = unpack(Packed(write.value.stream, buffers))
        if write.method is not None:
            self._copies.write(write.key, write.method, value)
            return
        # As on the server: the function updates in cross-replica context.
        with context.entered(pending.variables[0].distribute_strategy.extended.cross_replica_mode):
            self._copies.prepared_update(write.key, pending.function, *value)()

    def prepare(self, number: int) -> tuple[int, ...]:
        """Send the writes under a number, and return their servers. Raise NotPreparedError if one refuses a write."""
        with self._lock:
            by_server = grouped((pending.variables[0].server, pending.write) for pending in self._writes)
            servers = tuple(by_server)
            if servers:
                try:
                    self._servers.ask_packed(
                        [(server, "prepare", (number,), pack_writes(by_server[server])) for server in servers]
                    )
                except Exception as error:
                    raise NotPreparedError(servers) from error
            return servers


class NotPreparedError(RuntimeError):
    """A parameter server has refused a write, by the error that is the cause. ``servers`` wait for a decision."""

    def __init__(self, servers: tuple[int, ...]):
        super().__init__(servers)
        self.servers = servers
