"""The peak memory of a program and its children."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mpistrat.bench import under_ranks

_EVERY = 0.02
_PEAK = re.compile(r"VmHWM:\s+(\d+) kB")


def peak(program: Sequence[str]) -> int | None:
    """Return the sum of the peak memories of ``python program...`` and its children, or None without /proc.

    The result is in bytes. Shared memory counts once per process.

    Raises
    ------
    RuntimeError
        If the program fails.
    """
    if not os.path.exists("/proc/self/status"):
        return None
    peaks: dict[int, int] = {}
    with subprocess.Popen(
        [sys.executable, *under_ranks.safe_words(program)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        while process.poll() is None:
            for pid in _family(process.pid):
                peaks[pid] = max(peaks.get(pid, 0), _peak(pid))
            time.sleep(_EVERY)
        output = process.stdout.read() if process.stdout else ""
    if process.returncode:
        raise RuntimeError(f"{' '.join(program)} ended with status {process.returncode}:\n{output}")
    return sum(peaks.values())


def _family(pid: int) -> list[int]:
    found = [pid]
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += _family(int(child))
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def _peak(pid: int) -> int:
    try:
        match = _PEAK.search(Path(f"/proc/{pid}/status").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(match[1]) << 10 if match else 0
