"""Facts about processes from /proc: their start, parent, command, environment, state and memory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")


def batch_job() -> str:
    """Return the number of the batch job that this process is in, or an empty string."""
    return next((os.environ[name] for name in _JOB_VARIABLES if os.environ.get(name)), "")


def process_ids() -> list[int]:
    """Return the processes of this machine, none where there is no /proc (macOS)."""
    return sorted(int(path.name) for path in Path("/proc").glob("[0-9]*"))


def text(process: int, name: str) -> str:
    """Return a file of a process in /proc, empty if the process does not exist or is another user's."""
    try:
        return Path(f"/proc/{process}/{name}").read_text("utf-8", errors="replace")
    except OSError:
        return ""


def stat(process: int, thread: int | None = None) -> list[str]:
    """Return the fields of stat in proc(5) of a process or a thread, from its state on; none if it does not exist."""
    # From the last bracket on: the name of a program may have brackets and spaces.
    return text(process, "stat" if thread is None else f"task/{thread}/stat").rpartition(")")[2].split()


def started(process: int) -> int:
    """Return when a process started, in ticks since the boot of the machine, or 0 if the process does not exist."""
    fields = stat(process)
    return int(fields[19]) if fields else 0  # field 22 of proc(5)


def parent(process: int) -> int:
    """Return the process that started another one, or 0 if the process does not exist."""
    fields = stat(process)
    return int(fields[1]) if fields else 0


def state(process: int, thread: int | None = None) -> str:
    """Return the state of a process or thread, a letter as in /proc (R, S, D, T, Z), or X if it does not exist."""
    return (stat(process, thread) or "X")[0]


def command(process: int) -> list[str]:
    """Return the words of a process's command, none if the process does not exist."""
    return text(process, "cmdline").split("\0")


def environ(process: int) -> dict[str, str]:
    """Return the environment with which a process was started, empty if it is not a process of this user."""
    return dict(entry.partition("=")[::2] for entry in text(process, "environ").split("\0") if "=" in entry)


def maps(process: int, path: str) -> bool:
    """Return whether a process of this user maps a file whose path begins with ``path``."""
    return f" {path}" in text(process, "maps")


def out_of_memory_kills() -> int | None:
    """Return how many processes of this process's cgroup the system has killed for want of memory, or None."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text("utf-8").splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds == "":  # version 2 of cgroups, which has no controllers here
                file = Path(f"/sys/fs/cgroup{path}/memory.events")
            elif "memory" in kinds.split(","):
                file = Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
            else:
                continue
            with contextlib.suppress(OSError):
                words = dict(line.split()[:2] for line in file.read_text().splitlines())
                if "oom_kill" in words:
                    return int(words["oom_kill"])
    return None
