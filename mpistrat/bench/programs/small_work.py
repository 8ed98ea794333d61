"""What the calls of `mpistrat bench small` work on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np


class Work(NamedTuple):
    """What the calls work on, and where the files of the loops are.

    ``values`` are reduced as they are, given to a metric, or summed. ``few`` and ``many`` are gradients of the
    variables of the loop, and of 200 variables. ``array`` has 64 KiB, and ``arrays`` are 60 vectors of 16 to 4,096
    floats.
    """

    values: np.ndarray
    few: list[np.ndarray]
    many: list[np.ndarray]
    array: np.ndarray
    arrays: list[np.ndarray]
    folder: Path
    epochs: int


Call: TypeAlias = (
    "Callable[[int], Any]"  # of k: repeats the call k times, and returns what the last one returned
)
