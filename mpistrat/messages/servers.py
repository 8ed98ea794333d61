"""Requests of the other ranks to parameter servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np

from mpistrat.memory.buffer_pool import Buffers
from mpistrat.memory.published import Location, Reader, View
from mpistrat.messages.contact import Contact
from mpistrat.messages.mailbox import ask_in_bundles
from mpistrat.messages.pickling import EMPTY, Packed, pack
from mpistrat.process.cache import Cache

Request = tuple[int, str, tuple[Any, ...], Any]  # server, kind, head, value
_READS = frozenset({"read", "rows"})
_MOST = 10_000  # variables whose memory this rank remembers
_UNKNOWN: Any = object()
_copies = Buffers()
# A variable on a parameter server, a function that updates it, and the function's further arguments.
Update = tuple[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class SharedReads:
    """Reads of the parameter servers of this node, through shared memory. A read that fails goes by a message."""

    def __init__(self, contact: Contact):
        self._mailbox = contact.mailbox
        servers = enumerate(contact.roles.parameter_servers)
        self._ranks = {server: rank for server, rank in servers if rank in contact.neighbors}
        self._readers: dict[int, Reader] = {}
        self._views = Cache[int, View | None](_MOST)  # None: not published, or not for this rank

    def replies(self, requests: Sequence[Request]) -> list[np.ndarray | None]:
        """Return the replies to reads that need no message, of one moment for each parameter server; None for others.

        Raise LostRankError if a parameter server of this node is lost.
        """
        replies: list[np.ndarray | None] = [None] * len(requests)
        if not self._ranks or any(kind not in _READS for _, kind, _, _ in requests):
            return replies  # in one message a write may come before a read
        by_server: dict[int, list[int]] = {}
        for index, (server, *_) in enumerate(requests):
            if server in self._ranks:
                by_server.setdefault(server, []).append(index)
        for server, indices in by_server.items():
            self._mailbox.require(self._ranks[server])
            views = self._views_of(server, [requests[index][2][0] for index in indices])
            if any(view is None for view in views):
                continue
            copies = (_copy(view.array, requests[index]) for view, index in zip(views, indices, strict=True))
            values = self._readers[server].attempt(copies)
            if not all(view.lives for view in views):  # the parameter server answers what became of it
                for index in indices:
                    self.free(requests[index][2][0])
            elif values is not None:
                for index, value in zip(indices, values, strict=True):
                    replies[index] = value
        return replies

    def _views_of(self, server: int, keys: list[int]) -> list[Any]:
        known = ((key, self._views.get(key, _UNKNOWN)) for key in keys)
        # A copy: another thread may change what is known.
        views = {key: view for key, view in known if view is not _UNKNOWN}
        missing = [key for key in dict.fromkeys(keys) if key not in views]
        if missing:
            rank = self._ranks[server]
            locations = ask_in_bundles(self._mailbox, [(rank, "where", (key,), EMPTY) for key in missing])
            for key, location in zip(missing, locations, strict=True):
                views[key] = self._views.keep(key, None if location is None else self._mapped(server, location))
        return [views[key] for key in keys]

    def _mapped(self, server: int, location: Location) -> View | None:
        try:
            reader = self._readers.get(server)
            if reader is None:
                reader = self._readers[server] = Reader(location)
            return reader.view(location)
        except OSError:  # another container, or a limit of addresses: messages do
            return None

    def free(self, key: int) -> None:
        self._views.pop(key, None)


def _copy(view: np.ndarray, request: Request) -> np.ndarray:
    _, kind, _, rows = request
    if kind == "rows":
        return view[rows].copy()
    copy = _copies.empty(view.shape, view.dtype)
    np.copyto(copy, view)
    return copy


class Servers:
    """The parameter servers, for a rank that is not one of them."""

    def __init__(self, contact: Contact):
        self._contact = contact
        self._ranks = contact.roles.parameter_servers
        self._freed = contact.freed  # of all strategies: a dropped one sends no more requests of its own
        self._shared = SharedReads(contact)
        self._keeper: Any = None  # of the writes of a function that counts once

    @property
    def number(self) -> int:
        return len(self._ranks)

    def ask(self, server: int, kind: str, head: tuple[Any, ...], value: Any = None) -> Any:
        """Return the reply of a parameter server. Raise the error that it met."""
        (reply,) = self.ask_all([(server, kind, head, value)])
        return reply

    @contextmanager
    def kept_by(self, keeper: Any) -> Iterator[None]:
        """Let ``keeper`` answer in the block. It asks by `ask_now` and `ask_packed`."""
        self._keeper = keeper
        try:
            yield
        finally:
            self._keeper = None

    def ask_all(self, requests: Sequence[Request]) -> list[Any]:
        """Return the replies to requests, with one message to each parameter server and back. All work meanwhile."""
        return self.ask_now(requests) if self._keeper is None else self._keeper.ask_all(requests)

    def ask_now(self, requests: Sequence[Request]) -> list[Any]:
        """Return the replies of the parameter servers, as `ask_all`."""
        self._tell_freed()
        replies = self._shared.replies(requests)
        others = [index for index, reply in enumerate(replies) if reply is None]
        if others:
            asked = [
                (self._ranks[server], kind, head, EMPTY if value is None else pack(value)[0])
                for server, kind, head, value in (requests[index] for index in others)
            ]
            for index, reply in zip(others, ask_in_bundles(self._contact.mailbox, asked), strict=True):
                replies[index] = reply
        return replies

    def ask_packed(self, requests: Sequence[tuple[int, str, tuple[Any, ...], Packed]]) -> list[Any]:
        """Return the replies of the parameter servers to requests whose bodies are packed."""
        self._tell_freed()
        return self._contact.mailbox.ask_all(
            [(self._ranks[server], kind, head, body) for server, kind, head, body in requests]
        )

    def _tell_freed(self) -> None:
        mailbox = self._contact.mailbox
        while self._freed:
            server, key = self._freed.popleft()
            mailbox.send(self._ranks[server], "free", (key,))

    def update(self, updates: Sequence[Update]) -> list[Any]:
        """Return the results of functions that run beside their variables; None for each while they are kept."""
        requests: list[Request] = []
        functions = [self._contact.functions.packed(function) for _, function, _, _ in updates]
        for (variable, _, args, kwargs), sent in zip(updates, functions, strict=True):
            self._contact.functions.send(self._ranks[variable.server], sent)
            requests.append((variable.server, "update", (variable.key, sent.digest), (args, kwargs)))
        if self._keeper is None:
            return self.ask_now(requests)
        self._keeper.update(updates, functions)
        return [None] * len(requests)

    def free(self, server: int, key: int) -> None:
        """Note that a variable is not used any more. The next request tells its server."""
        self._freed.append((server, key))
        self._shared.free(key)


class NoServers:
    """The stand-in for the parameter servers in a function that runs on one of them."""

    number = 0

    def ask(self, *request: Any) -> NoReturn:
        """Raise RuntimeError: parameter servers do not ask each other."""
        raise RuntimeError(
            "a function that runs on a parameter server cannot read or write variables that it captures: pass them as "
            "arguments of extended.update"
        )

    ask_all = update = ask
