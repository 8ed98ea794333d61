"""A directory through which ranks tell rank 0 what keeps them from talking to it by MPI."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpistrat.cluster_resolver import Placement

# What all ranks of a launch have in common, and no other launch has; the innermost launcher first.
_KEYS = (
    ("PMIX_NAMESPACE",),
    ("JSM_NAMESPACE_ID", "LSB_JOBID"),
    ("PALS_APID",),
    ("FLUX_JOB_ID",),
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
)


def key_of(environ: Mapping[str, str], placement: Placement) -> str | None:
    """A text that all ranks of this launch have in common, None if there is none."""
    for names in _KEYS:
        if all(environ.get(name) for name in names):
            return " ".join(
                f"{name}={environ[name]}" for name in (*names, "SLURM_RESTART_COUNT") if name in environ
            )
    if placement.local_size == placement.size:
        return f"{placement.host} {os.getppid()}"
    return None


class Mailbox:
    """One file per rank in a directory that they all find. Where there is no such directory, nothing is kept.

    Parameters
    ----------
    key : str or None
        See `key_of`.
    """

    def __init__(self, key: str | None):
        self._folder = None if key is None else _folder(hashlib.sha256(key.encode()).hexdigest()[:16])

    @property
    def works(self) -> bool:
        """Whether there is a directory."""
        return self._folder is not None

    def exists(self) -> bool:
        """Whether the directory is still there."""
        return self._folder is not None and self._folder.exists()

    def put(self, name: str, value: Any) -> None:
        """Leave something, in place of what was left under this name."""
        if self._folder is None:
            return
        temporary = self._folder / f"{secrets.token_hex(8)}.tmp"
        with contextlib.suppress(OSError):
            descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
            with open(descriptor, "w") as file:
                json.dump(value, file)
            os.replace(temporary, self._folder / f"{name}.json")

    def get(self, name: str) -> Any:
        """What was left under a name, None if nothing."""
        if self._folder is None:
            return None
        try:
            return json.loads((self._folder / f"{name}.json").read_text())
        except (OSError, ValueError):
            return None

    def ranks(self) -> dict[int, Any]:
        """What each rank left, by its number."""
        if self._folder is None:
            return {}
        with contextlib.suppress(OSError):
            names = [path.stem for path in self._folder.iterdir() if path.suffix == ".json"]
            found = {int(name): self.get(name) for name in names if name.isdecimal()}
            return {rank: value for rank, value in sorted(found.items()) if value is not None}
        return {}

    def leave(self, *names: str) -> None:
        """Take away what was left under these names, and the directory if it is empty then."""
        if self._folder is None:
            return
        for name in names:
            with contextlib.suppress(OSError):
                (self._folder / f"{name}.json").unlink()
        with contextlib.suppress(OSError):
            self._folder.rmdir()


def _folder(name: str) -> Path | None:
    """The first directory that this user can make or has made, and nobody else can write to."""
    for parent in (Path.cwd(), Path.home(), Path(tempfile.gettempdir())):
        folder = parent / f".mpistrat-check-{name}"
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and os.access(folder, os.W_OK):
                return folder
    return None
