"""What the system tells of processes: their start, parent, command, environment, state and memory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")


def batch_job() -> str:
    """Return the number of the batch job that this process is in, or an empty string."""
    return next((os.environ[each] for each in _JOB_VARIABLES if os.environ.get(each)), "")


def started(process: int) -> int:
    """Return when a process started, in ticks since the boot of the machine, or 0 if the process does not exist."""
    try:
        text = Path(f"/proc/{process}/stat").read_bytes()
    except OSError:
        return 0
    return int(text.rpartition(b")")[2].split()[19])


def parent(process: int) -> int:
    """Return the process that started another one, or 0 if the process does not exist."""
    try:
        return int(Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def command(process: int) -> list[str]:
    """Return the words of a process's command, none if the process does not exist."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def environ(process: int) -> dict[str, str]:
    """Return the environment with which a process was started, empty if it is not a process of this user."""
    try:
        text = Path(f"/proc/{process}/environ").read_text(errors="replace")
    except OSError:
        return {}
    return dict(each.partition("=")[::2] for each in text.split("\0") if "=" in each)


def maps(process: int, path: str) -> bool:
    """Return whether a process of this user maps a file whose path begins so."""
    try:
        return f" {path}" in Path(f"/proc/{process}/maps").read_text(errors="replace")
    except OSError:
        return False


def out_of_memory_kills() -> int | None:
    """Return how many processes of this process's cgroup the system has killed for want of memory, or None."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds == "":
                file = Path(f"/sys/fs/cgroup{path}/memory.events")
            elif "memory" in kinds.split(","):
                file = Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
            else:
                continue
            with contextlib.suppress(OSError):
                words = dict(each.split()[:2] for each in file.read_text().splitlines())
                if "oom_kill" in words:
                    return int(words["oom_kill"])
    return None


def state(process: int) -> str:
    """Return the state of a process, a letter as in /proc (R, S, D, T, Z), or X if the process does not exist."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
