"""Reads of variables whose parameter server is on the same node, without a message to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.memory.buffer_pool import Buffers
from mpistrat.memory.published import Place, Reader, View
from mpistrat.messages.bundles import ask_in_bundles
from mpistrat.messages.contact import Contact
from mpistrat.messages.pickling import EMPTY
from mpistrat.process.cache import Cache

Request = tuple[int, str, tuple[Any, ...], Any]  # server, kind, head, value
_READS = frozenset({"read", "rows"})
_MOST = 10_000  # variables whose memory this rank remembers
_UNKNOWN: Any = object()
_copies = Buffers()


class SharedReads:
    """What this rank reads of the parameter servers of its node. A read is tried once, else a message asks."""

    def __init__(self, contact: Contact):
        self._post = contact.post
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
        for place, (server, *_) in enumerate(requests):
            if server in self._ranks:
                by_server.setdefault(server, []).append(place)
        for server, places in by_server.items():
            self._post.require(self._ranks[server])
            views = self._views_of(server, [requests[place][2][0] for place in places])
            if any(view is None for view in views):
                continue
            copies = (_copy(view.array, requests[place]) for view, place in zip(views, places, strict=True))
            values = self._readers[server].attempt(copies)
            if not all(view.lives for view in views):  # the parameter server answers what became of it
                for place in places:
                    self.free(requests[place][2][0])
            elif values is not None:
                for place, value in zip(places, values, strict=True):
                    replies[place] = value
        return replies

    def _views_of(self, server: int, keys: list[int]) -> list[Any]:
        known = ((key, self._views.get(key, _UNKNOWN)) for key in keys)
        # A copy: another thread may change what is known.
        found = {key: view for key, view in known if view is not _UNKNOWN}
        missing = [key for key in dict.fromkeys(keys) if key not in found]
        if missing:
            rank = self._ranks[server]
            places = ask_in_bundles(self._post, [(rank, "where", (key,), EMPTY) for key in missing])
            for key, place in zip(missing, places, strict=True):
                found[key] = self._views.keep(key, None if place is None else self._mapped(server, place))
        return [found[key] for key in keys]

    def _mapped(self, server: int, place: Place) -> View | None:
        try:
            reader = self._readers.get(server)
            if reader is None:
                reader = self._readers[server] = Reader(place)
            return reader.view(place)
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
