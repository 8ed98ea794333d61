"""Writes that a worker keeps while a function runs. The function reads its own writes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat import context, nest
from mpistrat.messages.functions import SentFunction
from mpistrat.messages.pickling import Packed, pack, unpack
from mpistrat.messages.servers import Request, Servers, Update
from mpistrat.variables.on_server import ServerVariable, known
from mpistrat.variables.once.prepared import Write, pack_writes
from mpistrat.variables.store import VariableStore


class _Kept(NamedTuple):
    """A write, with what is needed to apply it to copies of the variables."""

    write: Write
    variables: tuple[ServerVariable, ...]  # that it may change; the first one names the server
    function: Any  # that updates them
    kept: object  # what must live until the write is sent


class KeptWrites:
    """The writes of the function that runs.

    A read of a variable that the function has written gets a copy of the variable, made when it is first read, to
    which the writes have been applied. Other reads go to the parameter servers.

    Parameters
    ----------
    servers : Servers
    """

    def __init__(self, servers: Servers):
        self._servers = servers
        self._writes: list[_Kept] = []
        self._missing: list[_Kept] = []  # those that are not applied to the copies
        self._copies = VariableStore()
        self._lock = threading.RLock()  # a function may have threads

    def ask_all(self, requests: Sequence[Request]) -> list[Any]:
        """Return the replies to requests: of the parameter servers, or for own writes."""
        with self._lock:
            written = {each.key for kept in self._writes for each in kept.variables}
            replies: list[Any] = [None] * len(requests)
            others = []
            for i, (_, kind, (key, *head), value) in enumerate(requests):
                if kind == "write":
                    packed, references = pack(value, copy=True)
                    self._keep(_Kept(Write(key, head[0], b"", packed), (known(key),), None, references))
                    written.add(key)
                elif key in written:
                    own = self._own(key)
                    replies[i] = np.array(own if kind == "read" else own[value])
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
                others = (each for each in leaves if isinstance(each, ServerVariable))
                variables = (known(variable.key), *others)
                write = Write(variable.key, None, sent.digest, packed)
                self._keep(_Kept(write, variables, function, (references, sent)))

    def _keep(self, kept: _Kept) -> None:
        self._writes.append(kept)
        self._missing.append(kept)

    def _own(self, key: int) -> np.ndarray:
        """Return the copy of a variable, after the writes that matter for it."""
        needed, due = {key}, []
        for kept in reversed(self._missing):
            keys = {each.key for each in kept.variables}
            if keys & needed:
                needed |= keys
                due.append(kept)
        for kept in reversed(due):
            self._apply(kept)
            self._missing.remove(kept)
        return self._copies.array(key)

    def _apply(self, kept: _Kept) -> None:
        """Apply a write to the copies."""
        for each in kept.variables:
            if not self._copies.holds(each.key):
                (value,) = self._servers.ask_now([(each.server, "read", (each.key,), None)])
                self._copies.hold(each, value)
        write = kept.write
        buffers = tuple(map(bytearray, write.value.buffers))  # the function may change its arguments
        value = unpack(Packed(write.value.stream, buffers))
        if write.method is not None:
            self._copies.write(write.key, write.method, value)
            return
        stack = context.stack()
        depth = len(stack)
        stack.append(kept.variables[0].distribute_strategy.extended.cross_replica_mode)
        try:
            self._copies.prepared_update(write.key, kept.function, *value)()
        finally:
            del stack[depth:]

    def prepare(self, number: int) -> tuple[int, ...]:
        """Send the writes to their parameter servers under a number, and return these.

        Raises
        ------
        NotPreparedError
            If a parameter server refuses a write.
        """
        with self._lock:
            by_server: dict[int, list[Write]] = {}
            for kept in self._writes:
                by_server.setdefault(kept.variables[0].server, []).append(kept.write)
            servers = tuple(by_server)
            if servers:
                try:
                    self._servers.ask_packed(
                        [(each, "prepare", (number,), pack_writes(by_server[each])) for each in servers]
                    )
                except Exception as error:
                    raise NotPreparedError(servers) from error
            return servers


class NotPreparedError(RuntimeError):
    """A parameter server has refused a write. The cause is its error.

    Attributes
    ----------
    servers : tuple of int
        The servers that have got writes, and wait for a decision.
    """

    def __init__(self, servers: tuple[int, ...]):
        super().__init__(servers)
        self.servers = servers
