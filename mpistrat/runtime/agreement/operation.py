"""The description of a collective that ranks compare before they enter it."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import groupby
from types import FrameType
from typing import NamedTuple

import numpy as np

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MOST_PARTS = 4


class MismatchError(RuntimeError):
    """The ranks of a strategy are not all in the same collective. Raised on every rank."""


class ValueMismatchError(ValueError, MismatchError):
    """The ranks are in the same collective with values that do not fit together. Raised on every rank."""


class Remark(str):
    """A part of a description that messages show and the ranks do not compare."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Remark"


class Operation:
    """A collective by name and by all that must be equal on all ranks.

    Attributes
    ----------
    name : str
    parts : tuple
        Names, numbers, (dtype, shape) pairs, and remarks, which may differ.
    checksum : numpy.ndarray of int64, shape (2,)
        A CRC-32 of the above and its negative, so that one MAX over the ranks finds the largest and the
        smallest: they are equal where all agree.
    agreed : bytes
        What that MAX then is, in bytes.
    word : int
        The CRC-32 alone.
    word_bytes : bytes
        It, in 8 bytes of this machine.
    """

    __slots__ = ("agreed", "checksum", "name", "parts", "word", "word_bytes")

    def __init__(self, name: str, *parts: Hashable):
        self.name = name
        self.parts = parts
        self.word = crc = zlib.crc32(repr((name, parts)).encode())
        self.word_bytes = crc.to_bytes(8, sys.byteorder)
        self.checksum = np.array([crc, -crc], np.int64)
        self.agreed = self.checksum.tobytes()

    def __str__(self) -> str:
        return " ".join([self.name, *(_word(part) for part in self.parts if part not in ((), None))])


@lru_cache(maxsize=4096, typed=True)
def operation(name: str, *parts: Hashable) -> Operation:
    """An `Operation`, made once."""
    return Operation(name, *parts)


class Said(NamedTuple):
    """What one rank said it does."""

    name: str
    description: str
    place: str


def call_site() -> str:
    """`` at file:line`` of the user's code that is in a call of the package; nothing outside of any."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"


def mismatch(rank: int, sequence: int, said: Sequence[Said]) -> MismatchError:
    """The error of rank ``rank`` from what each rank said it does in collective number ``sequence``."""
    groups: dict[str, list[int]] = {}
    for each, (_, description, place) in enumerate(said):
        groups.setdefault(description + place, []).append(each)
    lines = "\n".join(f"  {ranks_in_words(ranks)}: {what}" for what, ranks in groups.items())
    if len({each.name for each in said}) == 1:
        return ValueMismatchError(
            f"rank {rank}: the ranks met with values that do not fit together (collective number {sequence}):\n"
            f"{lines}\nshapes, dtypes and options must be equal on all ranks."
        )
    return MismatchError(
        f"rank {rank}: the ranks met in different collectives (collective number {sequence}):\n"
        f"{lines}\nall ranks must make the same calls in the same order."
    )


def _word(part: Hashable) -> str:
    match part:
        case (np.dtype() as dtype, tuple() as shape):
            return str(dtype) + str(list(shape)).replace(" ", "")
        case tuple():
            runs = [(word, len(list(same))) for word, same in groupby(map(_word, part))]
            words = ", ".join(
                word if count == 1 else f"{count} x {word}" for word, count in runs[:_MOST_PARTS]
            )
            if len(runs) <= _MOST_PARTS:
                return words
            # Two that differ further on must not look alike.
            return f"{words}, ... ({len(part)} in all, checksum {zlib.crc32(repr(part).encode()):08x})"
    return str(part)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
