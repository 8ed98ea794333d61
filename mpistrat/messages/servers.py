"""What the other ranks ask of parameter servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

from mpistrat.messages.bundles import ask_in_bundles
from mpistrat.messages.contact import Contact
from mpistrat.messages.pickling import EMPTY, pack


class OnServer(Protocol):
    """A variable on a parameter server."""

    @property
    def key(self) -> int: ...

    @property
    def server(self) -> int: ...


Request = tuple[int, str, tuple[Any, ...], Any]
Update = tuple[OnServer, Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Servers:
    """The parameter servers, for a rank that is not one of them.

    Parameters
    ----------
    contact : Contact
    """

    def __init__(self, contact: Contact):
        self._contact = contact
        self._ranks = contact.roles.parameter_servers
        self._freed = contact.freed  # of all strategies: a dropped one sends no more requests of its own

    @property
    def number(self) -> int:
        """Number of parameter servers."""
        return len(self._ranks)

    def ask(self, server: int, kind: str, head: tuple[Any, ...], value: Any = None) -> Any:
        """Return the reply of a parameter server. Raise the error that it met."""
        (reply,) = self.ask_all([(server, kind, head, value)])
        return reply

    def ask_all(self, requests: Sequence[Request]) -> list[Any]:
        """Return the replies to requests, with one message to each parameter server and one back.

        The parameter servers work at the same time. Each does what its message asks for as a whole.
        """
        post = self._contact.post
        while self._freed:
            server, key = self._freed.popleft()
            post.send(self._ranks[server], "free", (key,))
        return ask_in_bundles(
            post,
            [
                (self._ranks[server], kind, head, EMPTY if value is None else pack(value)[0])
                for server, kind, head, value in requests
            ],
        )

    def update(self, updates: Sequence[Update]) -> list[Any]:
        """Return the results of functions that run beside their variables."""
        requests: list[Request] = []
        functions = self._contact.functions
        for variable, function, args, kwargs in updates:
            sent = functions.packed(function)
            functions.send(self._ranks[variable.server], sent)
            requests.append((variable.server, "update", (variable.key, sent.digest), (args, kwargs)))
        return self.ask_all(requests)

    def free(self, server: int, key: int) -> None:
        """Note that a variable is not used any more. The next request tells its server."""
        self._freed.append((server, key))


class NoServers:
    """What a function that runs on a parameter server has in place of the parameter servers."""

    number = 0

    def ask(self, server: int, kind: str, head: tuple[Any, ...], value: Any = None) -> NoReturn:
        """Raise RuntimeError: parameter servers do not ask each other."""
        raise RuntimeError(
            "a function that runs on a parameter server cannot read or write variables that it captures: pass them as "
            "arguments of extended.update"
        )

    def ask_all(self, requests: Sequence[Request]) -> NoReturn:
        """Raise RuntimeError, as `ask`."""
        self.ask(0, "", ())

    def update(self, updates: Sequence[Update]) -> NoReturn:
        """Raise RuntimeError, as `ask`."""
        self.ask(0, "", ())
