"""The resources of this machine for a job: cores, shared memory, access to the memory of other processes."""

from __future__ import annotations

import ctypes
import math
import os
from pathlib import Path


def cores() -> int:
    """Return the number of cores in the affinity mask of this process, or fewer if its container has a quota."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    quota = _quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return max(1, count if quota is None else min(count, math.ceil(quota)))


def _quota(groups: Path, root: Path) -> float | None:
    """Return the number of cores that the control group of this process may use, None if it may use all."""
    try:
        own = next(line[3:] for line in groups.read_text().splitlines() if line.startswith("0::"))
        quota, period = (root / own.strip("/") / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, StopIteration, ValueError):
        return None


def shared_memory_free() -> int | None:
    """Return the bytes free in /dev/shm, or None if it does not exist."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def reads_other_processes() -> bool:
    """Return whether processes may copy from each other's memory (Linux; containers can forbid the call)."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is None:
        return False
    source, target = ctypes.create_string_buffer(b"x", 1), ctypes.create_string_buffer(1)

    class Piece(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]

    here = Piece(ctypes.addressof(target), 1)
    there = Piece(ctypes.addressof(source), 1)
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    copied: int = call(os.getpid(), ctypes.byref(here), one, ctypes.byref(there), one, none)
    return copied == 1
