"""The progress of a loop or of a task farm: a bar on a terminal or in a notebook, or a line in a log now and then."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable
from time import time  # the clock of tqdm
from typing import Any

from tqdm import tqdm


def progress_of(
    iterable: Any,
    shown: bool,
    on_terminal: bool | None,
    every: float,
    desc: str | None,
    total: int | None,
    unit: str = "it",
    header: Callable[[], str] = str,
) -> tqdm:
    """Return an iterable that shows its progress if ``shown``; see `ProgressLog` for the other arguments.

    ``on_terminal`` says whether the errors of this process end at a terminal, though they are a pipe.
    """
    bar: Any = ProgressBar
    if "ipykernel" in sys.modules:
        from tqdm import auto  # a widget

        bar = auto.tqdm
    elif shown and not (on_terminal or sys.stderr.isatty()):
        return ProgressLog(iterable, header(), every, desc, total, unit)
    return bar(iterable, desc=desc, total=total, unit=unit, disable=not shown, leave=False)


class ProgressLog(tqdm):
    """A progress bar that prints a line to standard error every so many seconds, and one at the end, after a header.

    A loop that is shorter writes nothing. Bars inside other bars write whole lines, too.
    """

    _written = 0  # steps in the last line

    def __init__(self, iterable: Any, header: str, every: float, desc: str | None, total: int | None, unit: str = "it"):
        self._header = header and f"{header}\n"
        # Through `display` alone: to a file, tqdm writes what moves the cursor of a terminal.
        super().__init__(
            iterable, desc, total, file=io.StringIO(), ncols=0, delay=every, mininterval=every, miniters=1, unit=unit
        )

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Print the state if it is due. ``tqdm`` calls this method also for each ``set_postfix``."""
        at_end = self.disable
        if self.n != self._written and (at_end or time() - self.last_print_t >= self.mininterval):
            header = "" if self._written else self._header
            self._written = self.n
            print(f"{header}{str(self).strip()}", file=sys.stderr, flush=True)
        return True


class _Above:
    """Print warnings as before, while no bar is on the screen."""

    def __init__(self, before: Callable[..., None]):
        self.before = before

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        with tqdm.external_write_mode(sys.stderr):
            self.before(*args, **kwargs)  # also what records warnings, or logs them


class ProgressBar(tqdm):
    """A bar that a warning does not break. ``warnings.showwarning`` is restored when the last such bar closes."""

    _open = 0  # bars of this process that are shown
    _counted = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if not self.disable:
            self._count(True)

    def close(self) -> None:
        """Remove the bar."""
        super().close()
        if self._counted:
            self._count(False)

    def _count(self, opens: bool) -> None:
        with self.get_lock():
            self._counted = opens
            ProgressBar._open += 1 if opens else -1
            if isinstance(warnings.showwarning, _Above):
                if not ProgressBar._open:
                    warnings.showwarning = warnings.showwarning.before
            elif opens:
                warnings.showwarning = _Above(warnings.showwarning)
