"""A stream of a launcher, passed on without the banners in it."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from typing import IO

from mpistrat.cli.run.banners import Banner, Filter

_PATIENCE = 0.5  # seconds for which a text may be held back
_BLOCK = 1 << 16


class Forwarded:
    """A thread that copies what a launcher prints to a descriptor of this process.

    Parameters
    ----------
    pipe : binary file
        The output or the errors of the launcher.
    target : int
        The descriptor to write to.
    banners : tuple of Banner
        The texts to leave out.
    at_broken_pipe : callable
        Called if nothing reads ``target`` any more.

    Attributes
    ----------
    found : Filter
        The deaths and failures that banners told.
    line_ended : bool
        Whether the last byte that was written ends a line.
    """

    def __init__(
        self, pipe: IO[bytes], target: int, banners: tuple[Banner, ...], at_broken_pipe: Callable[[], object]
    ):
        self.found = Filter(banners)
        self.line_ended = True
        self._pipe, self._target, self._at_broken_pipe = pipe, target, at_broken_pipe
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait for the end of the stream. Other processes than the launcher may keep it open."""
        self._thread.join(seconds)

    def _copy(self) -> None:
        while True:
            ready = select.select([self._pipe], [], [], _PATIENCE if self.found.holds else None)[0]
            data = os.read(self._pipe.fileno(), _BLOCK) if ready else b""
            if ready and not data:
                break
            self._write(self.found.feed(data) if data else self.found.flush())
        self._write(self.found.close())

    def _write(self, data: bytes) -> None:
        if data:
            self.line_ended = data.endswith(b"\n")
        try:
            while data:
                data = data[os.write(self._target, data) :]
        except BlockingIOError:
            select.select([], [self._target], [])
            self._write(data)
        except BrokenPipeError:
            self._at_broken_pipe()
