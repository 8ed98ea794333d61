"""Open files for reads at any offset, without HDF5: a bounded number, each checked to be the described file."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from mpistrat.data.errors import DataFileError

_MOST_AT_ONCE = 1 << 30
_MOST_PIECES = 1024  # IOV_MAX of Linux


class Descriptor:
    """One file, open for reading."""

    __slots__ = ("_fd", "_mtime_ns", "_path", "_size")

    def __init__(self, path: str, size: int):
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise DataFileError.of_file(path, "it can no longer be found; fix: bring it back") from None
        except OSError as error:
            raise DataFileError.of_file(path, f"it cannot be opened ({error}); fix: see the error") from error
        self._path, self._size = path, size
        self._mtime_ns = -1

    def check(self, same: Callable[[str, int], bool]) -> None:
        """Check that the size of the file is unchanged; raise DataFileError if not.

        If the time of writing changed, ``same(path, mtime_ns)`` decides whether the file still has the same rows.
        """
        if self._fd < 0:  # closed to make room for other files; was checked when it was opened
            return
        found = os.fstat(self._fd)
        if found.st_size != self._size or (
            found.st_mtime_ns != self._mtime_ns and not same(self._path, found.st_mtime_ns)
        ):
            raise changed(self._path, self._size, found.st_size)
        self._mtime_ns = found.st_mtime_ns

    @property
    def version(self) -> tuple[str, int]:
        """What changes when the file is written to: its path, and its time of writing now, or when it was closed."""
        return self._path, self._mtime_ns if self._fd < 0 else os.fstat(self._fd).st_mtime_ns

    @property
    def checked(self) -> bool:
        """Whether `check` has passed since the file was opened."""
        return self._mtime_ns >= 0

    def read(self, offset: int, into: Sequence[memoryview]) -> None:
        """Fill memory with the bytes from ``offset`` on. Raise DataFileError if the file has fewer bytes."""
        if len(into) == 1 and os.preadv(self._fd, into, offset) == len(into[0]):
            return
        pieces = [piece for each in into for piece in _cut(each)]
        start = 0
        while start < len(pieces):
            count = os.preadv(self._fd, pieces[start : start + _MOST_PIECES], offset)
            if count == 0:
                wanted = offset + sum(map(len, pieces[start:]))
                found = os.fstat(self._fd).st_size
                if found != self._size:
                    raise changed(self._path, self._size, found)
                raise DataFileError.of_file(
                    self._path,
                    f"it is truncated, with {found} bytes instead of at least {wanted}; fix: copy or write it again",
                )
            offset += count
            while start < len(pieces) and count >= len(pieces[start]):
                count -= len(pieces[start])
                start += 1
            if count:
                pieces[start] = pieces[start][count:]

    def read_each(self, offsets: Sequence[int], size: int, into: memoryview, places: Sequence[int]) -> None:
        """Read ``size`` bytes at each of these offsets to these places in memory. Raise DataFileError as `read`."""
        read, fd = os.preadv, self._fd
        for offset, place in zip(offsets, places, strict=True):
            piece = into[place : place + size]
            if read(fd, [piece], offset) != size:
                self.read(offset, [piece])

    def will_need(self, offset: int, size: int) -> None:
        """Ask the system to read these bytes ahead, where it supports that."""
        # Do not test the page cache first: with RWF_NOWAIT Linux starts its own read-ahead, which is slower in all.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
        self._fd = -1

    def __del__(self) -> None:
        if self._fd >= 0:
            self.close()


class Files(Protocol):
    """The open files of a dataset, by number."""

    def __getitem__(self, number: int) -> Descriptor:
        """Return an open file. It may be closed when another file is requested."""


class Closable(Protocol):
    """What can be closed."""

    def close(self) -> None:
        """Close it."""


_Open = TypeVar("_Open", bound=Closable)


class KeptOpen(OrderedDict[str, _Open]):
    """A bounded number of open files by path. The least recently used one is closed first."""

    def __init__(self, most: int):
        super().__init__()
        self._most = most

    def opened(self, path: str, open_it: Callable[[], _Open]) -> _Open:
        """Return a file; open it if necessary."""
        if path not in self:
            while len(self) >= self._most:
                self.popitem(last=False)[1].close()
            self[path] = open_it()
        self.move_to_end(path)
        return self[path]


def changed(path: str, then: int, now: int) -> DataFileError:
    """Return the error for a file that has changed."""
    change = "truncated" if now < then else "written to"
    sizes = f" ({then} bytes then, {now} bytes now)" if now != then else ""
    return DataFileError.of_file(
        path,
        f"it was {change} after it was described{sizes}; "
        "fix: do not change data files while they are read, and write this one again",
    )


def _cut(piece: memoryview) -> list[memoryview]:
    if len(piece) <= _MOST_AT_ONCE:
        return [piece] if len(piece) else []
    return [piece[i : i + _MOST_AT_ONCE] for i in range(0, len(piece), _MOST_AT_ONCE)]
