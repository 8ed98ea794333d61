"""Decoders of HDF5 chunks, and the reader of chunks that must be decoded, or that hold parts of rows.

The decoders run in several threads: HDF5's own run inside its global lock. Measured with chunks of 1.5 MiB against
numcodecs: its gzip takes 2.8 times as long as isal, and its unshuffle 1.3 times as long as this one. Its zstd takes as
long, its fletcher32 0.4 times. The filters of hdf5plugin run inside HDF5's lock.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import sys
import threading
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache, partial
from typing import Any

import numpy as np

from mpistrat.data.errors import ChecksumError
from mpistrat.data.hdf5.raw import Descriptor, Files
from mpistrat.data.hdf5.records import Chunked
from mpistrat.data.rows import blocks
from mpistrat.data.rows.spec import native
from mpistrat.memory.made_once import Chunk, ForEach, MadeOnce
from mpistrat.runtime import affinity

DEFLATE, SHUFFLE, FLETCHER32, SZIP, NBIT, ZSTD = 1, 2, 3, 4, 5, 32015
_NAMES = {DEFLATE: "gzip", SHUFFLE: "shuffle", FLETCHER32: "fletcher32", ZSTD: "zstd"}
_NAMES_OF_OTHERS = {SZIP: "szip", NBIT: "nbit", 6: "scaleoffset", 32000: "lzf", 32001: "blosc", 32026: "blosc2"}

# Called with the stored bytes, the parameters of the filter, the number of bytes of the decoded chunk, and memory
# that a codec may use for its result. Returns the bytes before the filter was applied.
Codec = Callable[[Any, tuple[int, ...], int, "np.ndarray | None"], Any]


def name_of(filter: int) -> str:
    """Return the common name of a filter."""
    return _NAMES.get(filter) or _NAMES_OF_OTHERS.get(filter, f"filter {filter}")


def missing(filters: Sequence[int]) -> str | None:
    """Return why these filters cannot be decoded here, or None if they can."""
    for code in filters:
        if code not in CODECS:
            return f"its filter {name_of(code)} is HDF5's own"
        if code == ZSTD and _package("zstandard") is None:
            return "there is no Python package for zstd: install zstandard"
    return None


def decode(
    raw: Any, filters: Sequence[tuple[int, tuple[int, ...]]], mask: int, nbytes: int, into: np.ndarray | None = None
) -> np.ndarray:
    """Return the ``nbytes`` decoded bytes of a chunk, in the memory ``into`` if it is given.

    ``mask`` has a bit for each filter that was skipped. Raise ValueError if the bytes cannot be decoded or
    decode to another size, and ChecksumError if they do not match their checksum.
    """
    applied = [entry for position, entry in enumerate(filters) if not mask >> position & 1]
    # Filters are listed in the order of writing. The decoder that runs last, of position 0, fills `into`.
    for position, (number, values) in reversed(list(enumerate(applied))):
        raw = CODECS[number](raw, values, nbytes, into if position == 0 else None)
    if into is not None and raw is into:
        return into
    decoded = np.frombuffer(raw, np.uint8)
    if len(decoded) != nbytes:
        raise ValueError(f"a chunk has {len(decoded)} bytes when decoded, instead of {nbytes}")
    if into is None:
        return decoded
    into[:] = decoded
    return into


def _inflate(raw: Any, values: tuple[int, ...], nbytes: int, into: np.ndarray | None) -> Any:
    most = _size_limit(nbytes)
    # isal takes half the time of zlib or less. An object is as fast as a call of decompress(), which takes any memory.
    inflate = (_package("isal.isal_zlib") or zlib).decompressobj()
    try:
        # Without the limit, 3 MiB of a hostile file inflated to 3.1 GiB.
        inflated = inflate.decompress(raw, most + 1)
    except Exception as error:
        raise ValueError(f"gzip: {error}") from error
    if len(inflated) > most:
        raise ValueError(f"gzip: a chunk of {nbytes} bytes inflates to more than {most}")
    if not inflate.eof:
        raise ValueError(f"gzip: the stream ends after {len(inflated)} bytes of the chunk")
    return inflated


def _size_limit(nbytes: int) -> int:
    """Return how many bytes a filter may give for a chunk: other filters may have made it a little longer."""
    return nbytes + nbytes // 256 + 4096


def _unshuffle(raw: Any, values: tuple[int, ...], nbytes: int, into: np.ndarray | None) -> Any:
    size = values[0]
    data = np.frombuffer(raw, np.uint8)
    count = len(data) // size
    # HDF5 does not shuffle such chunks.
    if size <= 1 or count <= 1:
        return raw
    out = into if into is not None and len(into) == len(data) else np.empty_like(data)
    items = out[: count * size].reshape(count, size)
    for plane in range(size):  # four times as fast as a transposed copy
        items[:, plane] = data[plane * count : (plane + 1) * count]
    out[count * size :] = data[count * size :]  # bytes after the last whole element are not shuffled
    return out


def _check_fletcher32(raw: Any, values: tuple[int, ...], nbytes: int, into: np.ndarray | None) -> Any:
    view = memoryview(raw)
    data, stored = view[:-4], int.from_bytes(view[-4:], "little")
    checksum = fletcher32(data)
    # HDF5 before 1.6.3 stored the bytes of each half in the other order. Accept both, as HDF5 does.
    swapped = (checksum & 0x00FF00FF) << 8 | (checksum >> 8) & 0x00FF00FF
    if stored not in (checksum, swapped):
        raise ChecksumError(f"the stored checksum is {stored:#010x}, but that of the data is {checksum:#010x}")
    return data


def fletcher32(data: Any) -> int:
    """Return HDF5's fletcher32 checksum, of big-endian words of 16 bits, modulo 65535."""
    raw = np.frombuffer(data, np.uint8)
    if len(raw) % 2:
        raw = np.append(raw, np.uint8(0))  # HDF5 takes an odd last byte for the high one of a word
    words = raw.view(">u2")
    low = high = 0
    for first in range(0, len(words), _WORDS_AT_ONCE):
        block = words[first : first + _WORDS_AT_ONCE].astype(np.float64)
        total = int(block.sum())
        high += len(block) * low + int(block @ _WEIGHTS[_WORDS_AT_ONCE - len(block) :])
        low += total
    return _folded(high) << 16 | _folded(low)


_WORDS_AT_ONCE = 1 << 14  # sums of this many products are exact in float64
_WEIGHTS = np.arange(_WORDS_AT_ONCE, 0, -1, dtype=np.float64)


def _folded(value: int) -> int:
    # Reduction by adding carries gives 65535, never 0, for a multiple of 65535 other than 0.
    return (value - 1) % 65535 + 1 if value else 0


def _decode_zstd(raw: Any, values: tuple[int, ...], nbytes: int, into: np.ndarray | None) -> Any:
    package = _package("zstandard")
    try:
        if not hasattr(_local, "zstd"):
            _local.zstd = package.ZstdDecompressor()
        if into is None:
            # -1 if the frame does not say: only then does zstandard heed max_output_size.
            if (size := package.frame_content_size(raw)) > _size_limit(nbytes):
                raise ValueError(f"a chunk of {nbytes} bytes says that it has {size}")
            return _local.zstd.decompress(raw, max_output_size=_size_limit(nbytes))
        count = 0
        with _local.zstd.stream_reader(raw) as reader:
            while count < nbytes and (more := reader.readinto(into[count:].data)):
                count += more
        return into if count == nbytes else into[:count]
    except Exception as error:
        raise ValueError(f"zstd: {error}") from error


_local = threading.local()  # a decompressor is for one thread at a time
CODECS: dict[int, Codec] = {DEFLATE: _inflate, SHUFFLE: _unshuffle, FLETCHER32: _check_fletcher32, ZSTD: _decode_zstd}


@cache
def _package(name: str) -> Any:
    """Return a module, or None if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


_MOST_THREADS = 4
# Bytes of a chunk that ranks share, which takes 30 us. 2 ranks shuffled chunks of 128 KiB (gzip, by isal) in 0.85 of
# the time that they took with a cache each, but chunks of 32 KiB in 1.2 times, and of 16 KiB in 1.4 times that time.
_LEAST_SHARED = 64 << 10
_NICE = 10  # about a tenth of the CPU time of another thread on the same core


class DecodedChunks:
    """A pool of threads that decode chunks, and a cache of chunks with rows that were not read yet.

    It has ``most`` bytes, but at least the ``fewest`` chunks: by default one for each window of a batch. In its place,
    chunks that the ranks of the node keep for each other may be ``shared``.
    """

    def __init__(self, most: int = blocks.MOST_DECODED, fewest: int = 2) -> None:
        self._most, self._fewest = most, fewest
        self.shared: MadeOnce | None = None
        # By key: the chunk, its bytes, and how many of its rows were not read yet.
        self._kept: OrderedDict[Any, tuple[Any, int, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._threads = min(_MOST_THREADS, len(affinity.cores() or range(affinity.cores_of_machine())))

    def for_each(self, tasks: Sequence[Any], do: Callable[[Any], Any]) -> None:
        """Call ``do`` on each task, in this thread and in the pool; raise the first error."""
        helpers = min(self._threads, len(tasks)) - 1
        remaining = deque(tasks)

        def work() -> None:
            try:
                while remaining:
                    try:
                        task = remaining.popleft()
                    except IndexError:  # another thread took the last task
                        return
                    do(task)
            except BaseException:
                remaining.clear()  # the other threads stop after their current task
                raise

        if helpers <= 0:
            work()
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads - 1, "mpistrat-decode", _lower_priority)
        others = [self._pool.submit(work) for _ in range(helpers)]
        try:
            work()
        finally:
            for other in others:
                other.cancel()
            wait(others)  # they write to the arrays of the caller
        for other in others:
            if not other.cancelled():
                other.result()

    def use_all(self, parts: list[Chunk], for_each: ForEach | None = None, share: bool = True) -> None:
        """Use chunks of the cache, or make them. Ranks share chunks of which more rows may be needed."""
        for_each = for_each or self.for_each
        if self.shared is not None and share:
            shared = self.shared.use_all([part for part in parts if part.lacks], for_each)
            parts = [part for part in parts if not part.lacks] + shared
        # Kept ones first: another one would make room by dropping one of them.
        for_each(sorted(parts, key=lambda part: part.key not in self._kept), self._use)

    def _use(self, part: Chunk) -> None:
        chunk = self.get(part.key, part.rows)
        if chunk is None:
            chunk = part.make(None)
            if part.lacks:
                self.keep(part, chunk)
        part.use(chunk)

    def get(self, key: Any, rows: int) -> Any:
        """Return a chunk of the cache of which ``rows`` rows are read now, or None."""
        with self._lock:
            entry = self._kept.pop(key, None)
            if entry is None:
                return None
            chunk, nbytes, remaining = entry
            if remaining > rows:
                self._kept[key] = chunk, nbytes, remaining - rows  # at the end, as the most recently used
            else:
                self._bytes -= nbytes
            return chunk

    def keep(self, part: Chunk, chunk: Any) -> None:
        """Keep a chunk until its remaining rows are read. The least recently used chunks are dropped for it."""
        with self._lock:
            if part.key in self._kept:
                return
            while len(self._kept) >= self._fewest and self._bytes + part.nbytes > self._most:
                self._bytes -= self._kept.popitem(last=False)[1][1]
            self._kept[part.key] = chunk, part.nbytes, part.lacks
            self._bytes += part.nbytes

    def clear(self) -> None:
        """Drop all chunks."""
        with self._lock:
            self._kept.clear()
            self._bytes = 0


def by_number(numbers: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Yield each number of an array that ascends, and where it is."""
    cuts = (np.flatnonzero(np.diff(numbers)) + 1).tolist()
    for start, stop in itertools.pairwise([0, *cuts, len(numbers)] if len(numbers) else ()):
        yield int(numbers[start]), slice(start, stop)


def run_of(numbers: np.ndarray) -> Any:
    """Return a slice in place of numbers that follow on one another: NumPy copies by it in half the time."""
    first, last = numbers[0], numbers[-1]
    if last - first == len(numbers) - 1 and (numbers[1:] - numbers[:-1] == 1).all():
        return slice(int(first), int(last) + 1)
    return numbers


class ChunkedRows:
    """Reader of ``rows`` rows of a chunked dataset. ``key`` identifies it in the cache ``decoded`` of all datasets."""

    def __init__(
        self, layout: Chunked, rows: int, shape: tuple[int, ...], stored: np.dtype, key: Any, decoded: DecodedChunks
    ):
        self._layout = layout
        self._rows = rows
        self._chunk = layout.chunk
        self._stored = stored
        self._nbytes = int(np.prod(layout.chunk)) * stored.itemsize
        self._offsets, self._sizes = layout.places()
        self._key = key
        self._decoded = decoded
        # A whole chunk is decoded into the memory of its rows if it has all of their values, in native byte order.
        self._whole = layout.chunk[1:] == shape and stored == native(stored)
        steps = layout.chunk[1 : 1 + len(shape)]
        # For each of the chunks that a row lies in, the elements that it has. The shape cuts off the last ones.
        self._cells = [
            tuple(slice(i, min(i + step, size)) for i, step, size in zip(corner, steps, shape, strict=True))
            for corner in itertools.product(*(range(0, size, step) for size, step in zip(shape, steps, strict=True)))
        ]

    def read_run(self, files: Files, first: int, out: np.ndarray) -> None:
        size, last = self._chunk[0], first + len(out)
        runs = []
        for number in range(first // size, -(-last // size)):
            low, high = max(first, number * size), min(last, (number + 1) * size)
            rows = slice(low - number * size, high - number * size)
            runs.append((number, rows, slice(low - first, high - first)))
        self._read(files, runs, out)

    def read_rows(self, files: Files, rows: np.ndarray, out: np.ndarray, indices: np.ndarray) -> None:
        numbers, inside = np.divmod(rows, self._chunk[0])
        self._read(files, [(number, inside[part], indices[part]) for number, part in by_number(numbers)], out)

    def will_need(self, files: Files, first: int, last: int) -> None:
        count = len(self._cells)
        begin, end = first // self._chunk[0] * count, -(-last // self._chunk[0]) * count
        starts, stops = self._offsets[begin:end], (self._offsets + self._sizes)[begin:end]
        # One request for chunks that follow each other in the file.
        new = np.flatnonzero(starts[1:] != stops[:-1]) + 1
        starts, stops = starts[np.append(0, new)], stops[np.append(new - 1, len(stops) - 1)]
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            files[self._layout.file].will_need(start, stop - start)

    def _read(self, files: Files, runs: Iterable[tuple[int, Any, Any]], out: np.ndarray) -> None:
        file = files[self._layout.file]
        whole, parts = [], []
        for number, rows, indices in runs:
            wanted = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
            lacks = min(self._chunk[0], self._rows - number * self._chunk[0]) - wanted
            into = self._memory_for(rows, indices, out)
            for i, inner in enumerate(self._cells):
                chunk = number * len(self._cells) + i
                if into is not None:
                    whole.append((chunk, into))  # needs no cache, as all of its rows are read now
                    continue
                make, use = partial(self._decode, file, chunk), partial(self._use, out, rows, indices, inner)
                key = self._key, file.version, chunk
                parts.append(Chunk(key, self._nbytes, wanted, lacks, make, use))
        self._decoded.for_each(whole, lambda task: self._decode(file, *task))
        self._decoded.use_all(parts, share=self._nbytes >= _LEAST_SHARED)

    def _memory_for(self, rows: Any, indices: Any, out: np.ndarray) -> np.ndarray | None:
        """Return the memory of ``out`` into which a whole chunk can be decoded, or None."""
        if not (self._whole and isinstance(rows, slice)):
            return None
        part = out[indices]
        return part.reshape(-1).view(np.uint8) if len(part) == self._chunk[0] else None

    def _use(self, out: np.ndarray, rows: Any, indices: Any, inner: tuple[slice, ...], chunk: np.ndarray) -> None:
        wanted: tuple[Any, ...] = (rows, *(slice(0, span.stop - span.start) for span in inner))
        target: tuple[Any, ...] = (indices, *inner)
        out[target] = chunk.view(self._stored).reshape(self._chunk)[wanted]

    def _decode(self, file: Descriptor, chunk: int, into: np.ndarray | None = None) -> np.ndarray:
        raw = np.empty(int(self._sizes[chunk]), np.uint8).data
        file.read(int(self._offsets[chunk]), [raw])
        mask = int(self._layout.masks[chunk]) if len(self._layout.masks) else 0
        return decode(raw, self._layout.filters, mask, self._nbytes, into)


def _lower_priority() -> None:
    """Lower the priority of this thread, so that computations of the program go first on shared cores."""
    if sys.platform.startswith("linux"):  # on other systems it would change the whole process
        this = os.PRIO_PROCESS, threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(*this, min(19, os.getpriority(*this) + _NICE))
