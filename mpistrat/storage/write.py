"""A file that all ranks write at once, and its name at the end; and what their threads tell each other meanwhile."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mpistrat.process.files import appearing, write_all
from mpistrat.process.waiting import Backoff
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.topology import Slot, Topology
from mpistrat.verify.digest import digest

_TOKEN_BYTES = 8


def write_by_all(
    ranks: Topology,
    name: str,
    target: Path,
    replace: bool,
    make: Callable[[Path], Any],
    write: Callable[[Path, Any], Any],
    finish: Callable[[Path, list[Any]], object] = lambda temporary, results: None,
    check: Callable[[list[Any]], object] = lambda results: None,
) -> None:
    """Write a file by all ranks, which appears whole or not at all. Collective; messages call it ``name``.

    ``made = make(temporary)`` is called by rank 0, ``write(temporary, made)`` by each rank, which syncs what it has
    written. With what these returned, all ranks call ``check(results)``, and rank 0 ``finish(temporary, results)``.
    Raise on every rank what any of them raises; FileExistsError if ``target`` exists and ``replace`` is false.
    """
    with contextlib.ExitStack() as appears:  # rank 0's file

        def begin() -> tuple[str, Any]:
            new = appears.enter_context(appearing(target, replace))
            return new.name, make(new)

        def end() -> None:
            finish(temporary, results)
            appears.close()

        name_of_all, made = ranks.on_first(begin, operation(f"{name}: make the file"))
        temporary = target.with_name(name_of_all)
        results = ranks.on_all_ranks(partial(write, temporary, made))
        check(results)
        ranks.on_first(end, operation(f"{name}: give the file its name"))


class _KnownWriters(Slot, dict[str, tuple[int, ...]]):
    """The ranks that can write to files of a directory which rank 0 then reads, for each directory that was tried."""


def writers(ranks: Topology, directory: Path) -> tuple[int, ...]:
    """Return the ranks that can write to rank 0's files in a directory. Collective; rank 0 is always one.

    A directory of one node, or a file system that shows rank 0 other bytes than other nodes wrote, leaves the ranks of
    its node. It is tried once for each directory, which is made if need be. Raise OSError if rank 0 cannot make a file
    there.
    """
    known = ranks.slot(_KnownWriters)
    key = ranks.broadcast_object(os.path.abspath(directory))  # ranks with other working directories decide alike
    if key in known or ranks.size == 1:
        if ranks.rank == 0:  # it may have been removed since; what fails now fails again where the file is made
            with contextlib.suppress(OSError):
                directory.mkdir(parents=True, exist_ok=True)
        return known.get(key, (0,))
    path = directory / f".{secrets.token_hex(8)}.tmp"

    def begin() -> str:
        if not directory.exists():
            directory.mkdir(parents=True, exist_ok=True)
        path.touch(exist_ok=False)
        return path.name

    def read() -> tuple[int, ...]:
        content = path.read_bytes()
        tokens = [content[_TOKEN_BYTES * rank : _TOKEN_BYTES * (rank + 1)] for rank in range(ranks.size)]
        return tuple(rank for rank, token in enumerate(tokens) if rank == 0 or token == _token(rank))

    try:
        name = ranks.on_first(begin, operation("write by all ranks: make a file"))
        # "r+b" makes no file: it fails on a rank that does not see the file of rank 0.
        with contextlib.suppress(OSError), open(directory / name, "r+b", 0) as file:
            os.pwrite(file.fileno(), _token(ranks.rank), _TOKEN_BYTES * ranks.rank)
            os.fsync(file.fileno())  # file systems of a network show other nodes only what was synced
        ranks.barrier()
        able: tuple[int, ...] = ranks.on_first(read, operation("write by all ranks: read the file"))
    finally:
        if ranks.rank == 0:
            path.unlink(missing_ok=True)
    known[key] = able
    return able


def _token(rank: int) -> bytes:
    return (rank + 1).to_bytes(_TOKEN_BYTES, "little")


# --- what ranks tell each other by a second file, in threads, which must not call MPI ---------------------

_MOST_AT_END_S = 600.0  # for which the end of a program waits for a rank, whose disk may be broken


def write_report(path: Path, offset: int, report: list[Any]) -> None:
    """Report numbers to the other ranks, or the number and the text of an error."""
    payload = json.dumps(report).encode()
    with open(path, "r+b", buffering=0) as file:
        write_all(file.fileno(), struct.pack("<QQ", len(payload), digest(payload)) + payload, offset)
        os.fsync(file.fileno())


def await_report(path: Path, offset: int, rank: int, lost: threading.Event) -> list[int]:
    """Return the numbers that a rank reports, as soon as it has. Raise the error that it reports."""
    backoff, ended = Backoff(), math.inf
    while True:
        # Opened anew each time: a network file system shows what other nodes have written where a file is opened.
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            length, expected = struct.unpack("<QQ", file.read(16))
            payload = file.read(length) if length else b""
        # A report that is read while it is written has another digest: it is read again.
        if length and digest(payload) == expected:
            break
        if not threading.main_thread().is_alive():  # no call of the program can set `lost` any more
            ended = min(ended, time.monotonic())
        if lost.is_set() or time.monotonic() > ended + _MOST_AT_END_S:
            raise RuntimeError(f"rank {rank} did not report to the others on its part of the file")
        backoff.pause()
    match json.loads(payload):
        case [int(number), str(text)]:
            raise OSError(number, f"rank {rank}: {text}") if number else RuntimeError(f"rank {rank}: {text}")
        case numbers:
            return list(numbers)
