"""A directory through which ranks tell rank 0 what keeps them from talking to it by MPI."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpistrat.cluster_resolver import Placement
from mpistrat.runtime.process.launchers import FLUX, JSRUN, PALS, PMIX, SRUN

_RUN = "run"  # says which inbox is that of this launch

_KEYS = tuple(launcher.launch for launcher in (PMIX, JSRUN, PALS, FLUX, SRUN))  # the innermost first


def key_of(environ: Mapping[str, str], placement: Placement) -> str | None:
    """A text that all ranks of this launch have in common, None if there is none."""
    for names in _KEYS:
        if all(environ.get(name) for name in names):
            return " ".join(
                f"{name}={environ[name]}" for name in (*names, "SLURM_RESTART_COUNT") if name in environ
            )
    if placement.local_size == placement.size:
        parent = os.getppid()
        return f"{placement.host} {parent} {_start_of(parent)}"
    return None


class Inbox:
    """Where rank 0 finds the letters of the others. Where they share no directory, there are none.

    A launch may have a key that an earlier one had, which left letters there: numbers of processes repeat. So each
    inbox is a new directory, and the file ``run`` says which. Rank 0 reads a letter once, and takes it away.

    Parameters
    ----------
    key : str or None
        See `key_of`.

    Attributes
    ----------
    letters : dict
        The last letter of each rank, and what rank 0 itself has to tell.
    """

    def __init__(self, key: str | None):
        self.letters: dict[int, Any] = {}
        self._heard: dict[str, int] = {}  # the rank of each sender
        self._gone: set[str] = set()
        self._announced: set[str] = set()
        self._shared = _shared(key)
        self._folder: Path | None = None
        if self._shared is None:
            return
        with contextlib.suppress(OSError):
            folder = self._shared / secrets.token_hex(8)
            folder.mkdir(mode=0o700)
            self._folder = folder
            for old in self._shared.iterdir():
                if old != folder and old.is_dir():
                    shutil.rmtree(old, ignore_errors=True)
            _write(self._shared / _RUN, folder.name)

    @property
    def works(self) -> bool:
        """Whether there can be letters."""
        return self._folder is not None

    def collect(self) -> None:
        """Read what has come."""
        if self._folder is None:
            return
        with contextlib.suppress(OSError):
            # In the order in which each rank wrote them.
            for path in sorted(self._folder.glob("letter-*.json")):
                letter = _read(path)
                path.unlink()
                if letter is None:
                    continue
                self._heard[letter["from"]] = letter["rank"]
                if letter["goes"]:
                    self._gone.add(letter["from"])
                else:
                    self.letters[letter["rank"]] = letter["value"]
        for name in self._announced:
            self.announce(name)

    def announce(self, name: str) -> None:
        """Tell something to all whose letters were read, and will be."""
        self._announced.add(name)
        if self._folder is not None:
            with contextlib.suppress(OSError):
                _write(self._folder / name, sorted(self._heard))

    def all_have_gone(self) -> bool:
        """Whether all whose letters were read have said that they go."""
        self.collect()
        return self._gone >= set(self._heard)

    def close(self) -> None:
        """Take everything away."""
        if self._folder is None or self._shared is None:
            return
        shutil.rmtree(self._folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            if _read(self._shared / _RUN) == self._folder.name:
                (self._shared / _RUN).unlink()
        _remove_if_empty(self._shared)


class Outbox:
    """Through which another rank tells something to rank 0.

    It may begin before the inbox is there, or find that of an earlier launch: what it has to tell is sent again
    when there is a new one, and an announcement counts only if it names this sender.

    Parameters
    ----------
    key : str or None
        See `key_of`.
    rank : int
    """

    def __init__(self, key: str | None, rank: int):
        self._shared = _shared(key)
        self._rank = rank
        self._name = secrets.token_hex(8)
        self._letter: dict[str, Any] | None = None
        self._count = 0
        self._sent_to = ""  # the inbox that has the letter

    @property
    def works(self) -> bool:
        """Whether there can be letters."""
        return self._shared is not None

    def put(self, value: Any, *, goes: bool = False) -> None:
        """Tell something, in place of what was told before. ``goes``: it is the last."""
        self._letter = {"from": self._name, "rank": self._rank, "value": value, "goes": goes}
        self._count += 1
        self._sent_to = ""
        self._send()

    def announced(self, name: str) -> bool:
        """Whether rank 0 has read of this rank, and announced this."""
        if self._shared is None:
            return False
        self._send()
        heard = _read(self._shared / self._sent_to / name) if self._sent_to else None
        return isinstance(heard, list) and self._name in heard

    def is_closed(self) -> bool:
        """Whether rank 0 has taken the inbox away that it read of this rank in."""
        return self._shared is None or not self._sent_to or not (self._shared / self._sent_to).exists()

    def close(self) -> None:
        """Take away what was not read, and the directory if nothing is in it."""
        if self._shared is None:
            return
        with contextlib.suppress(OSError):
            for inbox in list(self._shared.iterdir()):
                with contextlib.suppress(OSError):  # rank 0 takes its inbox away meanwhile
                    for path in list(inbox.glob(f"letter-{self._rank}-{self._name}-*.json")):
                        path.unlink(missing_ok=True)
        _remove_if_empty(self._shared)

    def _send(self) -> None:
        if self._letter is None or self._shared is None:
            return
        inbox = _read(self._shared / _RUN)
        if isinstance(inbox, str) and inbox != self._sent_to:
            with contextlib.suppress(OSError):
                name = f"letter-{self._rank}-{self._name}-{self._count:06}.json"
                _write(self._shared / inbox / name, self._letter)
                self._sent_to = inbox


def _write(path: Path, value: Any) -> None:
    temporary = path.with_name(f"{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w") as file:
        json.dump(value, file)
    os.replace(temporary, path)


def _read(path: Path) -> Any:
    """What a file holds; None if it is not there, or not readable."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _start_of(process: int) -> str:
    """When a process of this machine began, which no other process with its number did; empty if it is not known."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _shared(key: str | None) -> Path | None:
    """The directory for a key: the first that this user can make or has made, and nobody else can write to."""
    if key is None:
        return None
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    for parent in (Path.cwd(), Path.home(), Path(tempfile.gettempdir())):
        folder = parent / f".mpistrat-check-{name}"
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and os.access(folder, os.W_OK):
                return folder
    return None
