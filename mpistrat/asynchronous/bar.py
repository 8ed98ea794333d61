"""A progress bar of calls: how many of those that were queued have ended."""

from __future__ import annotations

import sys
from typing import Any

from mpistrat.runtime.environment import rc


class CallsBar:
    """A bar from the first call until `close`, on a terminal. The next call begins another bar.

    Parameters
    ----------
    shown : bool
        Whether there is a bar at all. ``mpistrat.rc.progress`` may turn it off.

    Examples
    --------
    >>> bar = CallsBar(False)
    >>> bar.queued(), bar.ended(), bar.close()
    (None, None, None)
    """

    def __init__(self, shown: bool):
        self._shown = shown and rc.progress is not False and bool(rc.progress or sys.stderr.isatty())
        self._bar: Any = None

    def queued(self) -> None:
        """Count a call that was queued."""
        if not self._shown:
            return
        if self._bar is None:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=0, desc="calls", unit="call", leave=False)
        self._bar.total += 1

    def ended(self) -> None:
        """Count a call that has ended."""
        if self._bar is not None:
            self._bar.update()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
