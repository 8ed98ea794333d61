"""Signals that announce the end of a job."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from types import FrameType
from typing import Any

# The scheduler or the user ends a job by SIGTERM. `sbatch --signal` sends one of the other two.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

_watchers: weakref.WeakSet[PreemptionWatcher] = weakref.WeakSet()
_previous: dict[int, Any] = {}


class PreemptionWatcher:
    """A watcher for the signals that announce the end of this process: SIGTERM, SIGUSR1 or SIGUSR2.

    While it exists, these signals do not end the process. The first one is kept as the message. A handler that the
    program installed earlier is called as well. A signal that the program ignores stays ignored.

    Raises
    ------
    RuntimeError
        If it is not created in the main thread: Python allows only that thread to handle signals.

    Examples
    --------
    >>> import os, signal
    >>> watcher = PreemptionWatcher()
    >>> watcher.preemption_message
    >>> os.kill(os.getpid(), signal.SIGUSR2)
    >>> watcher.preemption_message.split(" at ")[0]
    'SIGUSR2'
    """

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "signals can be watched from the main thread only: create PreemptionWatcher and "
                "PreemptionCheckpointHandler there"
            )
        self._message: str | None = None
        self._signals: list[signal.Signals] = []
        _watchers.add(self)
        for number in SIGNALS:
            current = signal.getsignal(number)
            if current not in (_handle, signal.SIG_IGN):
                _previous[number] = current
                signal.signal(number, _handle)
                signal.siginterrupt(number, False)  # reads and writes of C libraries go on

    @property
    def preemption_message(self) -> str | None:
        """The signal that announced the end of this process and its time, or None."""
        return self._message

    @property
    def signals(self) -> tuple[signal.Signals, ...]:
        """The signals that arrived, each once, in order."""
        return tuple(self._signals)

    def clear(self) -> None:
        """Forget the signals that arrived."""
        self._message, self._signals = None, []

    def block_until_worker_exit(self) -> None:
        """Wait until this process is ended if that was announced, else return at once."""
        while self._message is not None:
            time.sleep(1)

    def _notice(self, number: int) -> None:
        received = signal.Signals(number)
        if self._message is None:
            self._message = f"{received.name} at {time.strftime('%H:%M:%S')}"
        if received not in self._signals:
            self._signals.append(received)


def _handle(number: int, frame: FrameType | None) -> None:
    watchers = list(_watchers)
    for watcher in watchers:
        watcher._notice(number)
    previous = _previous.get(number)
    if callable(previous):
        previous(number, frame)
    elif not watchers:  # no watcher is left: do what the signal does by default
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
