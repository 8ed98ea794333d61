"""Search for the process that holds a lock on a file."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def writer_of(path: str) -> str:
    """Return a text that names the process of this node that has locked a file for writing.

    Processes of other containers and other nodes cannot be found.
    """
    with contextlib.suppress(OSError):
        inode = os.stat(path).st_ino
        for line in Path("/proc/locks").read_text().splitlines():
            # 4: FLOCK  ADVISORY  WRITE 726 fe:00:2148707 0 EOF
            words = line.split()
            if "WRITE" in words and len(words) > 5 and words[5].endswith(f":{inode}") and int(words[4]) > 0:
                return f"process {words[4]}{_name(words[4])} of this node"
    return "a process on another node or in another container"


def _name(process: str) -> str:
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f" ({command.strip()[:80]})"
    return ""
