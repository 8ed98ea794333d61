"""One file that all ranks write at once: rank 0 makes it, each rank writes its part, and rank 0 names it."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mpistrat.data.errors import ChecksumError, DataFileError, DatasetMismatchError, FilterUnavailableError
from mpistrat.process.atomic_file import publish, to_disk
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.slot import Slot
from mpistrat.runtime.topology import Topology

_TOLD = (
    DatasetMismatchError,
    FilterUnavailableError,
    ChecksumError,
    DataFileError,
    FileExistsError,
    FileNotFoundError,
    PermissionError,
    OSError,
    MemoryError,
    LookupError,
    ArithmeticError,
    ValueError,
    TypeError,
)
_WORD = 8


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
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")

    def begin() -> tuple[str, Any]:
        return temporary.name, make(temporary)

    def end() -> None:
        finish(temporary, results)
        to_disk(temporary)
        publish(temporary, target, replace)
        to_disk(target.parent)

    try:
        shared, made = ranks.on_first(begin, operation(f"{name}: make the file"))
        results = all_or_raise(ranks, partial(write, target.with_name(shared), made))
        check(results)
        ranks.on_first(end, operation(f"{name}: give the file its name"))
    finally:
        if ranks.rank == 0:
            temporary.unlink(missing_ok=True)


def all_or_raise(ranks: Topology, fn: Callable[[], Any]) -> list[Any]:
    """Return the results of a function on all ranks, or raise on every rank if it raised on one. Collective.

    Ranks whose function returns early wait without a limit of time.
    """
    mine: Any = None
    failure: Exception | None = None
    try:
        mine = fn()
    except Exception as error:
        failure = error
    told = None if failure is None else (_known(failure), str(failure))
    everyone = ranks.all_gather_object((mine, told), math.inf)
    if failure is not None:
        raise failure
    for rank, (_, reported) in enumerate(everyone):
        if reported is not None:
            kind, text = reported
            raise kind(f"rank {rank}: {text}")
    return [result for result, _ in everyone]


def _known(error: Exception) -> type[Exception]:
    """Return the class of an error, or of its nearest base, that takes a text and that other ranks can load."""
    return next((kind for kind in type(error).__mro__ if kind in _TOLD), RuntimeError)


class _Seen(Slot):
    """The ranks that can write to files of a directory which rank 0 then reads, for each directory that was tried."""

    def __init__(self) -> None:
        self.by_directory: dict[str, tuple[int, ...]] = {}


def writers(ranks: Topology, directory: Path) -> tuple[int, ...]:
    """Return the ranks that can write to rank 0's files in a directory. Collective; rank 0 is always one.

    A directory of one node, or a file system that shows rank 0 other bytes than other nodes wrote, leaves the ranks of
    its node. It is tried once for each directory, which is made if need be. Raise OSError if rank 0 cannot make a file
    there.
    """
    seen = ranks.slot(_Seen).by_directory
    key = ranks.broadcast_object(os.path.abspath(directory))  # ranks with other working directories decide alike
    if key in seen or ranks.size == 1:
        if ranks.rank == 0:  # it may have been removed since; what fails now fails again where the file is made
            with contextlib.suppress(OSError):
                directory.mkdir(parents=True, exist_ok=True)
        return seen.get(key, (0,))
    path = directory / f".{secrets.token_hex(8)}.tmp"

    def begin() -> str:
        if not directory.exists():
            directory.mkdir(parents=True, exist_ok=True)
        path.touch(exist_ok=False)
        return path.name

    def read() -> tuple[int, ...]:
        found = path.read_bytes()
        words = [found[_WORD * rank : _WORD * (rank + 1)] for rank in range(ranks.size)]
        return tuple(rank for rank, word in enumerate(words) if rank == 0 or word == _word(rank))

    try:
        name = ranks.on_first(begin, operation("write by all ranks: make a file"))
        with contextlib.suppress(OSError):
            descriptor = os.open(directory / name, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.pwrite(descriptor, _word(ranks.rank), _WORD * ranks.rank)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        ranks.barrier()
        found: tuple[int, ...] = ranks.on_first(read, operation("write by all ranks: read the file"))
    finally:
        if ranks.rank == 0:
            path.unlink(missing_ok=True)
    seen[key] = found
    return found


def _word(rank: int) -> bytes:
    return (rank + 1).to_bytes(_WORD, "little")
