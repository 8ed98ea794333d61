"""Reading the bytes of files one after another: no program reads faster."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence


def epoch(files: Sequence[str], piece: int) -> int:
    """Read all files into one buffer of ``piece`` bytes. Return their total bytes."""
    buffer = mmap.mmap(-1, piece)  # aligned to a page: copies to it are faster than to memory of malloc
    total = 0
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total


if __name__ == "__main__":
    epoch(sys.argv[2:], int(sys.argv[1]))
