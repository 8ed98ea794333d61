"""The check that the data directory is on all nodes, writable, and has working file locks."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path
from typing import Any

from mpistrat.cli.check.job import CheckedJob, CheckOptions, Finding, Severity, size

_VISIBLE_TIMEOUT_S = 3.0  # until other nodes must see a new file
_LITTLE = 2**30


def local(options: CheckOptions) -> dict[str, Any] | None:
    if options.data is None or not _first_on_node():
        return None
    folder = Path(options.data).absolute()
    facts: dict[str, Any] = {"folder": str(folder), "files": _file_system(folder)}
    if not folder.is_dir():
        return {**facts, "missing": True}
    # Others may write to this folder: a name that they can guess could be a link to a file of this user.
    own = folder / f".mpistrat-check-{secrets.token_hex(8)}.h5"
    try:
        descriptor = os.open(own, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except OSError as error:
        existing = next(folder.glob("*.h5"), None)
        facts["unwritable"] = str(error.strerror)
        return facts if existing is None else {**facts, **_locked(existing, "r")}
    try:
        with open(descriptor, "wb") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())  # NFS reports a full disk or a quota here, not at the write
        facts.update(_locked(own, "w"))
        status = os.statvfs(folder)
        facts["free"] = status.f_bavail * status.f_frsize
    except OSError as error:
        facts["unwritable"] = str(error.strerror or error)
    finally:
        with contextlib.suppress(OSError):
            own.unlink()
    return facts


def _first_on_node() -> bool:
    """Return whether this rank tests for its node: the first one, or every rank if that is not known."""
    from mpistrat.cluster_resolver import resolve

    try:
        return resolve().placement.local_rank in (0, None)
    except (RuntimeError, ValueError):
        return True


def _locked(path: Path, mode: str) -> dict[str, str]:
    """Open a file with h5py and a lock. Return the error, if there is one."""
    import h5py

    try:
        with h5py.File(path, mode, locking=True) as file:
            if mode == "w":
                file["x"] = 1
    except OSError as error:
        return {"lock": " ".join(str(error).split())}
    return {}


def _file_system(folder: Path) -> str:
    """Return the type of the file system of a directory."""
    best, kind = "", "?"
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, place, name, *_ = line.split()
            if (f"{folder}/").startswith(place.rstrip("/") + "/") and len(place) >= len(best):
                best, kind = place, name
    return kind


def talk(talk: Any, options: CheckOptions) -> list[int] | None:
    """Return the ranks that do not see a new file of rank 0 in the directory."""
    path: Path | None = None
    if talk.rank == 0 and options.data is not None:
        path = Path(options.data).absolute() / f".mpistrat-check-{secrets.token_hex(8)}"
        try:
            path.touch(exist_ok=False)
        except OSError:
            path = None
    place = talk.tell(None if path is None else str(path))
    sees = True
    if place is not None and talk.rank in talk.leaders:
        end = time.monotonic() + _VISIBLE_TIMEOUT_S
        while not (sees := os.path.exists(place)) and time.monotonic() < end:
            time.sleep(0.05)
    told = talk.collect(sees)
    if path is not None:
        path.unlink(missing_ok=True)
    return None if told is None else [rank for rank, each in enumerate(told) if not each]


def judge(job: CheckedJob) -> Finding:
    facts = job.of("data")
    if job.options.data is None:
        return Finding("no directory given", Severity.UNKNOWN, "mpistrat check --data DIR")
    if not facts:
        return Finding("no rank reported", Severity.UNKNOWN)
    for rank, each in facts.items():
        where = f"{each['folder']} on {job.facts[rank]['host']} ({each['files']})"
        if each.get("missing"):
            return Finding(f"{where}: there is no such directory", Severity.FIX, "mount it on all nodes of the job")
        if "lock" in each:
            return Finding(
                f"{where}: HDF5 cannot lock files: {each['lock']}",
                Severity.FIX,
                "export HDF5_USE_FILE_LOCKING=BEST_EFFORT (or mount it with flock), and let one process write a file",
            )
        if "unwritable" in each:
            return Finding(
                f"{where}: not writable: {each['unwritable']}",
                Severity.FIX,
                "checkpoints and caches cannot be written there: use another directory, or let it be mounted "
                "read-write on the compute nodes",
            )
    blind = job.talked.get("data")
    if blind:
        hosts = ", ".join(job.facts[rank]["host"] for rank in blind[:4])
        return Finding(
            f"a file that rank 0 made is not seen on {hosts}",
            Severity.FIX,
            "each node has its own directory of this name: use a shared file system",
        )
    first = next(iter(facts.values()))
    text = f"{first['folder']} ({first['files']}): writable, locks work, {size(first['free'])} free"
    if first["free"] < _LITTLE:
        return Finding(text, Severity.LOOK, "little space is left for checkpoints")
    return Finding(text, Severity.OK)
