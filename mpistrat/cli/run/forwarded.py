"""A stream of a launcher, passed on without the banners in it."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from typing import IO

from mpistrat.cli.run.banners import Banner, Filter
from mpistrat.runtime.atomic_file import write_all

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
    at_write_error : callable
        Called if ``target`` cannot be written to: its reader has ended, or the disk is full.

    Attributes
    ----------
    found : Filter
        The deaths and failures that banners told.
    line_ended : bool
        Whether the last byte that was written ends a line.
    write_error : OSError or None
        Why ``target`` could not be written to.
    """

    def __init__(
        self, pipe: IO[bytes], target: int, banners: tuple[Banner, ...], at_write_error: Callable[[], object]
    ):
        self.found = Filter(banners)
        self.line_ended = True
        self.write_error: OSError | None = None
        self._pipe, self._target, self._at_write_error = pipe, target, at_write_error
        self._blocks = 0  # that were read
        self._waits = False  # for the launcher, rather than for the reader of ``target``
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait for the end of the stream, or until it was silent for so long: other processes may keep it open.

        A slow reader of ``target`` gets the time that it needs.
        """
        while self._thread.is_alive():
            blocks = self._blocks
            self._thread.join(seconds)
            if self._waits and self._blocks == blocks:
                return
        self._pipe.close()

    def _copy(self) -> None:
        while True:
            self._waits = True
            ready = select.select([self._pipe], [], [], _PATIENCE if self.found.holds else None)[0]
            self._waits = False
            data = os.read(self._pipe.fileno(), _BLOCK) if ready else b""
            if ready and not data:
                break
            self._blocks += 1
            self._write(self.found.feed(data) if data else self.found.flush())
        self._write(self.found.close())

    def _write(self, data: bytes) -> None:
        if data:
            self.line_ended = data.endswith(b"\n")
        if self.write_error is None:
            try:
                write_all(self._target, data)
            except OSError as error:  # what follows is read all the same, so that the launcher can end
                self.write_error = error
                self._at_write_error()
