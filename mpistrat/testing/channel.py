"""Messages between a pytest session and the ranks of its job, one socket per rank.

The session reads the end of a socket when its rank ends. The first socket that ends is the one of the rank that the job
has lost.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _pytest._code.code import ReprExceptionInfo


#: Begins the title of a rank that a deadline found in no test.
WAITS = "waits for the other ranks "


class RankEnd:
    """The channel of a rank to the session that has started its job."""

    def __init__(self, address: str, rank: int):
        import socket
        from multiprocessing.connection import Connection

        connected = socket.socket(socket.AF_UNIX)
        connected.connect(address)
        self._connection = Connection(connected.detach())
        self._connection.send(rank)

    def send(self, kind: str, content: object) -> None:
        """Send something to the session, if it still runs."""
        with contextlib.suppress(OSError):  # else a rank in a test that hangs would not end itself
            self._connection.send((kind, content))

    def receive(self) -> Any:
        """Return what the session sends next, or None if it has closed the channel."""
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            return None


def error_shown(path: str, line: int, message: str, text: str) -> ReprExceptionInfo:
    """Return an error of a test that is known as a text, in a form that pytest shows, summarizes and sends."""
    from _pytest._code.code import ReprExceptionInfo, ReprFileLocation, ReprTracebackNative

    location = ReprFileLocation(path, line, message)
    return ReprExceptionInfo(reprtraceback=ReprTracebackNative([text.rstrip() + "\n"]), reprcrash=location)
