"""Notices that the nodes of a job leave for each other in shared directories, when MPI does not work.

A notice lies in one directory of each file system that nodes may share, since it is not known which of them they do.
The directories of a job are made with its first notice, so a job that never leaves one costs a look for each of them.
A file system that does not answer is left alone until it does.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mpistrat.launch.launchers import hashed
from mpistrat.process.waiting import within

T = TypeVar("T")

_PREFIX = ".mpistrat-board-"
_KEPT = 24 * 3600.0  # seconds after which the boards of jobs that were killed are removed
_ANSWER_S = 5.0  # seconds in which a file system must answer: one that hangs would stop the start of the program
_CACHED = 60.0  # seconds for which NFS does not ask for a directory again, at most: the default of acdirmax
_ATTEMPTS = 3
_ENDING = ".json"
_CLAIM = "claim-"
_MOUNTS = Path("/proc/self/mountinfo")
# Who may write to the parent directory may rename another directory of the user to a name that is expected here. So
# what was made here has a mode that other directories do not have, which `mkdir` sets in one step, and only files in
# such a directory are removed.
_MODE = 0o1700  # the sticky bit, and no rights for others
_BITS = 0o1777  # without the bits that a directory may get from its parent
_INBOX, _MESSAGE = "inbox", "message-"


class SharedDirectory:
    """The notices of the nodes of one job, whose ranks alone know the text ``key``.

    They lie in ``parents``, the home directory, that for temporary files, and the working directory. All nodes see one
    after ``delay`` seconds, at the latest.
    """

    def __init__(self, key: str, parents: Sequence[Path] = ()):
        self._name = _PREFIX + hashed(key)
        by_device = _one_of_each_file_system(parents)
        self._folders = [parent / self._name for parent in by_device.values()]
        self.delay = _CACHED if any(map(_is_nfs, by_device)) else 0.0
        self._late: dict[Path, threading.Event] = {}  # by folder: the end of a call that took too long

    @property
    def folders(self) -> tuple[str, ...]:
        return tuple(str(folder.parent) for folder in self._folders)

    def forget(self) -> None:
        """Keep no notices from now on."""
        self._folders = []

    def make(self) -> bool:
        """Make the directories. Return whether any of them can be used."""
        return any(self._in_each(make_own_folder))

    def post(self, name: str, value: Any) -> None:
        """Add a notice, or replace the one of this name."""

        def post(folder: Path) -> None:
            for _ in range(_ATTEMPTS):
                _remove_old(folder.parent)
                with contextlib.suppress(FileNotFoundError):  # another rank has just removed the directory
                    if make_own_folder(folder):
                        write_json(folder / f"{name}{_ENDING}", value)
                    return

        self._in_each(post)

    def names(self) -> set[str]:
        return set().union(*self._in_each(_names))

    def read(self, name: str) -> Any:
        """Return a notice, or None if it was removed or is damaged."""
        values = self._in_each(lambda folder: read_json(folder / f"{name}{_ENDING}") if is_own_folder(folder) else None)
        return next((value for value in values if value is not None), None)

    def take_down(self, names: Collection[str], useless: Callable[[str], bool] = lambda name: False) -> None:
        """Remove notices, and each directory of none but ``useless`` ones, also what a file system writes late."""

        def remove(folder: Path) -> None:
            if is_own_folder(folder):
                for name in names:
                    (folder / f"{name}{_ENDING}").unlink(missing_ok=True)
                if all(map(useless, rest := _names(folder))):
                    for path in (*folder.glob(f"{_CLAIM}*"), *(folder / f"{name}{_ENDING}" for name in rest)):
                        path.unlink(missing_ok=True)
                    folder.rmdir()  # not if another rank has just posted a notice

        def remove_late(folder: Path, ended: threading.Event) -> None:
            ended.wait()
            with contextlib.suppress(OSError):
                remove_own_folder(folder)

        self._in_each(remove)
        for folder, ended in self._late.items():
            if not ended.is_set():
                threading.Thread(target=remove_late, args=(folder, ended), daemon=True).start()

    def claim(self, name: str) -> bool:
        """Return whether no other process that shares one of the directories has claimed this name before."""

        def claim(folder: Path) -> bool:
            try:
                os.close(os.open(folder / (_CLAIM + name), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            except FileExistsError:
                return False
            return True

        return all(self._in_each(lambda folder: not is_own_folder(folder) or claim(folder)))

    def _in_each(self, do: Callable[[Path], T]) -> list[T]:
        """Return what a function returns for each directory, and leave out those where it fails."""
        results = []
        for folder in self._folders:
            if folder in self._late and not self._late[folder].is_set():
                continue
            ended = threading.Event()
            try:
                results.append(within(_ANSWER_S, partial(_call, do, folder, ended)))
            except TimeoutError:
                self._late[folder] = ended
            except OSError:
                pass
        return results


def _call(do: Callable[[Path], T], folder: Path, ended: threading.Event) -> T:
    try:
        return do(folder)
    finally:
        ended.set()


def _one_of_each_file_system(first: Sequence[Path]) -> dict[int, Path]:
    """Return directories for notices, by the number of the file system.

    The working directory is the last choice, and only if no other user can write to it.
    """
    by_device: dict[int, Path] = {}
    for candidates in (
        lambda: first,
        lambda: [Path.home()],
        lambda: [Path(tempfile.gettempdir())],
        lambda: [folder for folder in [Path.cwd()] if only_this_user_writes(folder)],
    ):
        with contextlib.suppress(OSError, RuntimeError):  # it was removed, or is not known
            for path in candidates():
                device = within(_ANSWER_S, partial(_device_of_writable, path))
                if device is not None:
                    by_device.setdefault(device, path)
    return by_device


def _is_nfs(device: int) -> bool:
    """Return whether the file system of this number is NFS, as far as the system tells."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in _MOUNTS.read_text("utf-8", errors="replace").splitlines():
            mount, _, kind = line.partition(" - ")
            if mount.split()[2] == number:
                return kind.startswith("nfs")
    return False


def _device_of_writable(path: Path) -> int | None:
    return path.stat().st_dev if os.access(path, os.W_OK | os.X_OK) else None


def _names(folder: Path) -> set[str]:
    if not is_own_folder(folder):
        return set()
    return {name.removesuffix(_ENDING) for name in os.listdir(folder) if name.endswith(_ENDING)}


def write_json(path: Path, value: Any) -> None:
    """Put a JSON value into a file that other users cannot read, in one step."""
    temporary = path.with_name(f"{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(temporary, path)


def read_json(path: Path) -> Any:
    """Return the JSON value in a file, or None if the file is missing or not readable."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _remove_old(parent: Path) -> None:
    end = time.time() - _KEPT
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if is_own_folder(folder) and folder.stat().st_mtime < end:
                remove_own_folder(folder)


def make_own_folder(folder: Path) -> bool:
    """Make a directory, unless it exists. Return whether it was made here. Raise OSError if it cannot be made."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, _MODE)
    return is_own_folder(folder)


def is_own_folder(folder: Path) -> bool:
    """Return whether a directory is there and was made here, by this user."""
    try:
        return _is_own(folder.lstat())
    except OSError:
        return False


def remove_own_folder(folder: Path) -> None:
    """Remove a directory that was made here, and the files in it, but no directories. Do nothing where it was not.

    Raise OSError if it is not empty then, or is not there.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if not _is_own(os.fstat(descriptor)):
            return
        for name in os.listdir(descriptor):
            with contextlib.suppress(FileNotFoundError, IsADirectoryError, PermissionError):
                os.unlink(name, dir_fd=descriptor)
    finally:
        os.close(descriptor)
    folder.rmdir()


def only_this_user_writes(folder: Path) -> bool:
    """Return whether no other user but root can put files into a directory, or rename them there."""
    status = folder.stat()
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & 0o022


def _is_own(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and status.st_mode & _BITS == _MODE


class Inbox:
    """The messages of the other ranks to rank 0; ``messages`` has the last of each. Empty without a shared directory.

    A launch that was killed may have left messages under the same key. So each inbox has a name, which messages repeat.
    """

    def __init__(self, key: str | None):
        self.messages: dict[int, Any] = {}
        self._senders: set[str] = set()
        self._gone: set[str] = set()
        self._announced: set[str] = set()
        self._name = secrets.token_hex(8)
        self._board = _board(key)
        self._board.post(_INBOX, self._name)

    @property
    def works(self) -> bool:
        """Whether the ranks have a directory for messages."""
        return bool(self._board.folders)

    def collect(self) -> None:
        """Read the messages that arrived."""
        self._board.post(_INBOX, self._name)  # NFS looks at a directory again after a change that is made here
        for name in self._board.names():
            message = self._board.read(name) if name.startswith(_MESSAGE) else None
            if message is None or message["to"] != self._name:
                continue
            self._senders.add(message["from"])
            if message["goes"]:
                self._gone.add(message["from"])
            else:
                self.messages[message["rank"]] = message["value"]
        for name in self._announced:
            self.announce(name)

    def announce(self, name: str) -> None:
        """Announce a name to all senders of messages, also to those whose messages arrive later."""
        self._announced.add(name)
        self._board.post(name, sorted(self._senders))

    def all_have_gone(self) -> bool:
        """Return whether all senders of messages have sent their last one."""
        self.collect()
        return self._gone >= self._senders

    def close(self) -> None:
        """Remove the inbox, and what was left in it."""
        if self._board.read(_INBOX) == self._name:
            self._board.take_down(self._board.names(), lambda name: True)


class FileQueue:
    """The messages of one rank to rank 0, sent again to each new inbox, since an earlier launch may have left one.

    An announcement counts only if it names this sender.
    """

    def __init__(self, key: str | None, rank: int):
        self._board = _board(key)
        self._notice = f"{_MESSAGE}{rank}"
        self._name = secrets.token_hex(8)
        self._rank = rank
        self._message: dict[str, Any] | None = None
        self._sent_to: str | None = None  # the inbox that got the message

    @property
    def works(self) -> bool:
        return bool(self._board.folders)

    def put(self, value: Any, *, goes: bool = False) -> None:
        """Send a message that replaces the previous one. ``goes`` marks the last message."""
        self._message = {"from": self._name, "rank": self._rank, "value": value, "goes": goes}
        self._sent_to = None
        self._send()

    def announced(self, name: str) -> bool:
        """Return whether rank 0 read a message of this rank and announced this name."""
        self._send()
        senders = self._board.read(name)
        return isinstance(senders, list) and self._name in senders

    def is_closed(self) -> bool:
        """Return whether rank 0 removed the inbox that got the message."""
        return self._sent_to is None or self._board.read(_INBOX) != self._sent_to

    def close(self) -> None:
        """Remove an unread message of this rank, and the directory if it is empty."""
        self._board.take_down([self._notice])

    def _send(self) -> None:
        if self._message is None:
            return
        inbox = self._board.read(_INBOX)
        if isinstance(inbox, str) and inbox != self._sent_to:
            self._board.post(self._notice, {**self._message, "to": inbox})
            self._sent_to = inbox


def _board(key: str | None) -> SharedDirectory:
    """Return the board for the messages of a key; one that takes none without a key, or a directory for it."""
    board = SharedDirectory(f"messages {key}")  # the watchdogs of this launch have one of their own
    if key is None or not board.make():
        board.forget()
    return board
