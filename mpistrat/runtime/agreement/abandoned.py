"""Whether a turn that is taken is somebody's still.

Python interrupts a program between any two lines: by KeyboardInterrupt, or an error of a signal handler. One that
comes just behind the line which takes the turn, or just before the one that gives it back, leaves it taken.
"""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TAKE = {"turn", "begin"}


def anyone_in_turn(caller: FrameType) -> bool:
    """Whether a thread is in a function of the package that takes turns, other than ``caller``, which asks for one.

    Who holds a turn is in such a function until it is given back.
    """
    this = threading.get_ident()
    for thread, frame in sys._current_frames().items():
        at: FrameType | None = caller.f_back if thread == this else frame
        while at is not None:
            code = at.f_code
            if code.co_filename.startswith(_PACKAGE) and not _TAKE.isdisjoint(
                code.co_names + code.co_freevars
            ):
                return True
            at = at.f_back
    return False
