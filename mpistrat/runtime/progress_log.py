"""The progress of a loop or of a task farm in a log: a line now and then."""

from __future__ import annotations

import io
import sys
from time import time  # the clock of tqdm
from typing import Any

from tqdm import tqdm


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
