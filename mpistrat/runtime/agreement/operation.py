"""The description of a collective that ranks compare before they enter it."""

from __future__ import annotations

import math
import re
import sys
import zlib
from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import groupby
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from mpistrat.process.own_files import is_own
from mpistrat.representation import grouped, ranges

_MOST_PARTS = 4
_BELOW = 30


class TimedOutError(TimeoutError, RuntimeError):
    """Ranks did not come to a collective in time. A RuntimeError too, as programs for torch and Gloo catch it."""


class MismatchError(RuntimeError):
    """The ranks of a strategy are not all in the same collective. Raised on every rank.

    ``reports`` has the collective of each rank, if all ranks are in step and may go on; else it is empty.
    """

    reports: tuple[RankReport, ...] = ()


class ValueMismatchError(ValueError, MismatchError):
    """The ranks are in the same collective with values that do not match. Raised on every rank."""


class UncomparedText(str):
    """A part of a description that messages show and ranks do not compare."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Remark"


class Checksum(str):
    """A part of a description that ranks compare, and that says nothing to a reader of the flight record."""

    __slots__ = ()


class Operation:
    """The description of a collective: its name, and everything that must be equal on all ranks.

    ``parts`` are names, numbers, (dtype, shape) pairs, and remarks, which may differ. ``nbytes`` is the size of the
    arrays. ``token`` is a CRC-32, shifted left by 30 bits for the sequence number. The flight record sets ``record``,
    the number of its text there, and ``site``, where it was called last.
    """

    __slots__ = ("name", "nbytes", "parts", "record", "site", "token")

    def __init__(self, name: str, *parts: Hashable):
        self.name = name
        self.parts = parts
        self.token = zlib.crc32(repr((name, parts)).encode()) << _BELOW
        self.nbytes = _nbytes(parts)
        self.record = 0
        self.site: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return self._in_words(True)

    @property
    def label(self) -> str:
        """The text without checksums and bare numbers, for the flight record."""
        return self._in_words(False)

    def _in_words(self, checksums: bool) -> str:
        # A root or an axis tells calls of an error apart. Elsewhere a bare number says nothing.
        parts = (part for part in self.parts if checksums or not isinstance(part, int))
        words = (_word(part, checksums) for part in parts if part not in ((), None))
        return " ".join([self.name, *filter(None, words)])


@lru_cache(maxsize=4096, typed=True)
def operation(name: str, *parts: Hashable) -> Operation:
    """Return a cached `Operation`."""
    return Operation(name, *parts)


class RankReport(NamedTuple):
    """The collective that one rank reports in an error message."""

    # name and description of the operation, and the line of the program that called it
    name: str
    description: str
    line: str
    sequence: int  # the number of collectives that the rank entered, including this one
    interrupted: str  # the call of this rank that was interrupted, or an empty string
    interrupted_in_it: bool  # whether the interruption came in the middle of a collective


def call_site(frame: FrameType | None = None) -> str:
    """Return `` at file:line`` of the user's code that called the package, or an empty string.

    ``frame`` is the innermost one of another thread; by default the caller's.
    """
    frame = frame or sys._getframe()
    while frame is not None and is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"


def mismatch(rank: int, sequence: int, reports: Sequence[RankReport]) -> MismatchError:
    """Return the error of rank ``rank`` for different operations in collective number ``sequence``."""
    # The check `collectives` has put the line into the description.
    lines = _in_groups([report.description.removesuffix(report.line) + report.line for report in reports])
    error: MismatchError
    if len({report.name for report in reports}) == 1:
        error = ValueMismatchError(
            f"rank {rank}: the ranks met with values that do not fit together (collective number {sequence}):\n"
            f"{lines}\nshapes, dtypes and options must be equal on all ranks{_exception(reports)}."
        )
    else:
        error = MismatchError(
            f"rank {rank}: the ranks met in different collectives (collective number {sequence}):\n"
            f"{lines}\nall ranks must make the same calls in the same order. Take a call that only some ranks make out "
            "of its `if`, and leave a loop on all ranks at once: `strategy.agree(ok)` decides for all."
        )
    error.reports = tuple(reports)
    return error


def _exception(reports: Sequence[RankReport]) -> str:
    """Return which calls take values that differ as these do."""
    if reports[0].name == "all_gather":
        return (
            ", except the lengths along the axis. Above, the first number is the axis, the second one the number of "
            "dimensions, and the shape leaves the axis out"
        )
    of_rows = {re.sub(r"\[\d+", "[", report.description) for report in reports}
    if reports[0].name == "all_reduce" and len(of_rows) == 1:
        return (
            ". Outside of run, strategy.reduce(..., axis=0) adds up different numbers of rows, and "
            "strategy.gather(..., axis=0) joins them. A rank without rows gives an array of shape (0, ...)"
        )
    return ""


def sequence_mismatch(rank: int, sequence: int, reports: Sequence[RankReport]) -> MismatchError:
    """Return the error of rank ``rank``, in collective number ``sequence``, for different sequence numbers."""
    lines = _in_groups([f"{r.description}{r.line} (collective number {r.sequence})" for r in reports])
    causes = "\n".join(report.interrupted for report in reports if report.interrupted)
    return MismatchError(
        f"rank {rank}: the ranks are not in step in collective number {sequence}:\n{lines}\n"
        f"{causes or 'a rank left a collective before its end'}\n"
        "other ranks may have the result of that call already, so it cannot be repeated: end the program."
    )


def _in_groups(texts: Sequence[str]) -> str:
    """Return a line for each different text, with the ranks that report it."""
    groups = grouped((text, rank) for rank, text in enumerate(texts))
    return "\n".join(f"  {ranks_in_words(ranks)}: {text}" for text, ranks in groups.items())


def _nbytes(part: Hashable) -> int:
    match part:
        case (np.dtype() as dtype, tuple() as shape):
            return int(dtype.itemsize * math.prod(shape))
        case tuple():
            return sum(map(_nbytes, part))
    return 0


def _word(part: Hashable, checksums: bool) -> str:
    match part:
        case (np.dtype() as dtype, tuple() as shape):
            return str(dtype) + str(list(shape)).replace(" ", "")
        case Checksum():
            return f"(checksum {part})" if checksums else ""
        case tuple():
            texts = filter(None, (_word(item, checksums) for item in part))
            runs = [(word, len(list(same))) for word, same in groupby(texts)]
            words = ", ".join(word if count == 1 else f"{count} x {word}" for word, count in runs[:_MOST_PARTS])
            if len(runs) <= _MOST_PARTS:
                return words
            # The checksum tells apart two lists that differ only after the first parts.
            more = f", checksum {zlib.crc32(repr(part).encode()):08x}" if checksums else ""
            return f"{words}, ... ({len(part)} in all{more})"
    return str(part)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks as text, such as ``ranks 0-2, 5``."""
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks, ', ')}"
