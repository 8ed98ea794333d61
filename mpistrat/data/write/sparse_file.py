"""A file in memory that may have holes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

_PAGE = 4096


class SparseFile(io.RawIOBase):
    """A file in memory that h5py can write. Holes take no memory, but count in ``size``."""

    def __init__(self) -> None:
        self.size = 0
        self._place = 0
        self._pages: dict[int, bytearray] = {}
        self._written: dict[tuple[int, int], None] = {}  # (offset, bytes) of each write, in order

    def written(self) -> Iterator[tuple[int, bytes]]:
        """Yield the offset and the bytes of each write."""
        for offset, count in self._written:
            data = bytearray(count)
            self._copy_out(offset, memoryview(data))
            yield offset, bytes(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = offset + (0, self._place, self.size)[whence]
        return self._place

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start, page, inside, count in _parts(self._place, len(view)):
            memory = self._pages.setdefault(page, bytearray(_PAGE))
            memory[inside : inside + count] = view[start : start + count]
        self._written[self._place, len(view)] = None
        self._place += len(view)
        self.size = max(self.size, self._place)
        return len(view)

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer from the position. Holes read as zeros."""
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self.size - self._place)]
        self._copy_out(self._place, view)
        self._place += len(view)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        self.size = self._place if size is None else size
        return self.size

    def _copy_out(self, offset: int, view: memoryview) -> None:
        for start, page, inside, count in _parts(offset, len(view)):
            memory = self._pages.get(page)
            view[start : start + count] = bytes(count) if memory is None else memory[inside : inside + count]


def _parts(offset: int, length: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (start in the range, page, start in the page, length) for each page of a range of bytes."""
    start = 0
    while start < length:
        page, inside = divmod(offset + start, _PAGE)
        count = min(_PAGE - inside, length - start)
        yield start, page, inside, count
        start += count
