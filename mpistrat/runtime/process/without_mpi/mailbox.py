"""A directory through which ranks report to rank 0 when MPI does not work."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

from mpistrat.runtime.process.launch_key import hashed
from mpistrat.runtime.process.without_mpi import own_folder

_RUN = "run"  # file with the name of the inbox of this launch


class Inbox:
    """The letters of the other ranks to rank 0. It stays empty if the ranks share no directory.

    Process numbers repeat, so a launch may have the key of an earlier launch that left letters behind. Each inbox is
    therefore a new directory, whose name is in the file ``run``. Rank 0 reads a letter once and removes it.

    Parameters
    ----------
    key : str or None
        See `launch_key.key_of`.

    Attributes
    ----------
    letters : dict
        The last letter of each rank, that of rank 0 included.
    """

    def __init__(self, key: str | None):
        self.letters: dict[int, Any] = {}
        self._heard: dict[str, int] = {}  # rank by sender
        self._gone: set[str] = set()
        self._announced: set[str] = set()
        self._shared = _shared(key)
        self._folder: Path | None = None
        if self._shared is None:
            return
        with contextlib.suppress(OSError):
            folder = self._shared / secrets.token_hex(8)
            own_folder.make(folder)
            self._folder = folder
            for old in self._shared.iterdir():
                if old != folder and old.is_dir():
                    with contextlib.suppress(OSError):
                        own_folder.remove(old)
            write_json(self._shared / _RUN, folder.name)

    @property
    def works(self) -> bool:
        """Whether the ranks have a directory for letters."""
        return self._folder is not None

    def collect(self) -> None:
        """Read the letters that arrived."""
        if self._folder is None:
            return
        with contextlib.suppress(OSError):
            # Sorted names are in the order in which each rank wrote its letters.
            for path in sorted(self._folder.glob("letter-*.json")):
                letter = read_json(path)
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
        """Announce a name to all senders of letters, also to those whose letters arrive later."""
        self._announced.add(name)
        if self._folder is not None:
            with contextlib.suppress(OSError):
                write_json(self._folder / name, sorted(self._heard))

    def all_have_gone(self) -> bool:
        """Return whether all senders of letters have sent their last one."""
        self.collect()
        return self._gone >= set(self._heard)

    def close(self) -> None:
        """Remove the inbox."""
        if self._folder is None or self._shared is None:
            return
        with contextlib.suppress(OSError):
            own_folder.remove(self._folder)
        with contextlib.suppress(OSError):
            if read_json(self._shared / _RUN) == self._folder.name:
                (self._shared / _RUN).unlink()
        _remove_if_empty(self._shared)


class Outbox:
    """The letters of one rank to rank 0.

    The outbox may exist before the inbox, or find the inbox of an earlier launch. The letter is sent again to each new
    inbox, and an announcement counts only if it names this sender.

    Parameters
    ----------
    key : str or None
        See `launch_key.key_of`.
    rank : int
    """

    def __init__(self, key: str | None, rank: int):
        self._shared = _shared(key)
        self._rank = rank
        self._name = secrets.token_hex(8)
        self._letter: dict[str, Any] | None = None
        self._count = 0
        self._sent_to = ""  # the inbox that got the letter

    @property
    def works(self) -> bool:
        """Whether the ranks have a directory for letters."""
        return self._shared is not None

    def put(self, value: Any, *, goes: bool = False) -> None:
        """Send a letter that replaces the previous one. ``goes`` marks the last letter."""
        self._letter = {"from": self._name, "rank": self._rank, "value": value, "goes": goes}
        self._count += 1
        self._sent_to = ""
        self._send()

    def announced(self, name: str) -> bool:
        """Return whether rank 0 read a letter of this rank and announced this name."""
        if self._shared is None:
            return False
        self._send()
        heard = read_json(self._shared / self._sent_to / name) if self._sent_to else None
        return isinstance(heard, list) and self._name in heard

    def is_closed(self) -> bool:
        """Return whether rank 0 removed the inbox that got the letter."""
        return self._shared is None or not self._sent_to or not (self._shared / self._sent_to).exists()

    def close(self) -> None:
        """Remove unread letters of this rank, and the directory if it is empty."""
        if self._shared is None:
            return
        with contextlib.suppress(OSError):
            for inbox in list(self._shared.iterdir()):
                with contextlib.suppress(OSError):  # rank 0 may remove its inbox meanwhile
                    for path in list(inbox.glob(f"letter-{self._rank}-{self._name}-*.json")):
                        path.unlink(missing_ok=True)
        _remove_if_empty(self._shared)

    def _send(self) -> None:
        if self._letter is None or self._shared is None:
            return
        inbox = read_json(self._shared / _RUN)
        if isinstance(inbox, str) and inbox != self._sent_to:
            with contextlib.suppress(OSError):
                name = f"letter-{self._rank}-{self._name}-{self._count:06}.json"
                write_json(self._shared / inbox / name, self._letter)
                self._sent_to = inbox


def write_json(path: Path, value: Any) -> None:
    """Put a JSON value into a file that other users cannot read, in one step.

    Raises
    ------
    OSError
        If the directory is full or cannot be written to.
    """
    temporary = path.with_name(f"{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w") as file:
        json.dump(value, file)
    os.replace(temporary, path)


def read_json(path: Path) -> Any:
    """Return the JSON value in a file, or None if the file is missing or not readable."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _shared(key: str | None) -> Path | None:
    """Return the directory of a key: the first that this package has made and that can be written to, or None.

    It lies in the working directory only where no other user can write.
    """
    if key is None:
        return None
    name = hashed(key)
    for parent in (_own_working_directory, Path.home, lambda: Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError, RuntimeError):  # it was removed, or is not known
            folder = parent() / f".mpistrat-check-{name}"
            if own_folder.make(folder) and os.access(folder, os.W_OK):
                return folder
    return None


def _own_working_directory() -> Path:
    if not own_folder.only_this_user_writes(Path.cwd()):
        raise PermissionError("others may write to the working directory")
    return Path.cwd()
