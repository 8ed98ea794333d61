"""Tables that are legible in a terminal and in the log of a job."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def console() -> Console:
    """Where tables are printed: without colours, and wide enough, where there is no terminal."""
    from rich.console import Console

    try:
        columns = os.get_terminal_size(
            1
        ).columns  # none: the pseudo-terminal that a launcher makes for its ranks
    except OSError:
        columns = 0
    if columns:
        return Console(highlight=False)
    return Console(width=140, highlight=False, force_terminal=False, no_color=True)
