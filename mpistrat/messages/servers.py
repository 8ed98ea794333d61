"""What the other ranks ask of parameter servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from mpistrat.messages.bundles import ask_in_bundles
from mpistrat.messages.contact import Contact
from mpistrat.messages.pickling import EMPTY, Packed, pack
from mpistrat.messages.shared_reads import Request, SharedReads

# A variable on a parameter server, a function that updates it, and the function's further arguments.
Update = tuple[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]]


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
        others = [place for place, reply in enumerate(replies) if reply is None]
        if others:
            asked = [
                (self._ranks[server], kind, head, EMPTY if value is None else pack(value)[0])
                for server, kind, head, value in (requests[place] for place in others)
            ]
            for place, reply in zip(others, ask_in_bundles(self._contact.post, asked), strict=True):
                replies[place] = reply
        return replies

    def ask_packed(self, requests: Sequence[tuple[int, str, tuple[Any, ...], Packed]]) -> list[Any]:
        """Return the replies of the parameter servers to requests whose bodies are packed."""
        self._tell_freed()
        return self._contact.post.ask_all(
            [(self._ranks[server], kind, head, body) for server, kind, head, body in requests]
        )

    def _tell_freed(self) -> None:
        post = self._contact.post
        while self._freed:
            server, key = self._freed.popleft()
            post.send(self._ranks[server], "free", (key,))

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
    """What a function that runs on a parameter server has in place of the parameter servers."""

    number = 0

    def ask(self, *request: Any) -> NoReturn:
        """Raise RuntimeError: parameter servers do not ask each other."""
        raise RuntimeError(
            "a function that runs on a parameter server cannot read or write variables that it captures: pass them as "
            "arguments of extended.update"
        )

    ask_all = update = ask
