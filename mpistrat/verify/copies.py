"""The variables of which all ranks have equal copies, and their comparison, a share at a time."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpistrat.arrays.arrays import as_bytes
from mpistrat.process import mpi
from mpistrat.runtime.topology import Topology
from mpistrat.verify.corruption import CorruptionError, corruption, same, suspects
from mpistrat.verify.digest import digest, section

_EACH = 8 << 10  # a digest costs as much as that of so many bytes, if it is short
_BLOCK = 16 << 10  # elements that ranks exchange to find those that differ


class EqualVariable(Protocol):
    """A variable of which each rank has a copy."""

    @property
    def name(self) -> str: ...

    def own_copy(self) -> Any:
        """Return this rank's copy, an array of any library."""


class Piece(NamedTuple):
    """Some elements of a variable."""

    variable: EqualVariable
    start: int
    stop: int

    @property
    def content(self) -> np.ndarray:
        return np.ascontiguousarray(section(self.variable.own_copy(), self.start, self.stop))


class EqualCopies:
    """The copies of variables on these ranks, in the order of their creation, which is collective.

    A pass goes through all of them. The ranks collect garbage at different times, so that a pass begins with an
    agreement on what still exists, and keeps it alive.
    """

    def __init__(self) -> None:
        self._known: list[weakref.ref[EqualVariable]] = []
        self._rest: list[tuple[EqualVariable, int]] = []  # of this pass, in reverse order; where each goes on

    def __len__(self) -> int:
        return len(self._known)

    def add(self, variable: EqualVariable) -> None:
        self._known.append(weakref.ref(variable))

    def next_share(self, world: Any, nbytes: int) -> list[Piece]:
        """Return the next pieces, of about ``nbytes``. Collective where a pass begins."""
        if not self._rest:
            found = [reference() for reference in self._known]
            exist = np.array([variable is not None for variable in found], np.uint8)
            world.Allreduce(mpi.start().IN_PLACE, exist, mpi.start().MIN)
            kept = [variable for variable, exists in zip(found, exist, strict=True) if variable is not None and exists]
            self._known = [*map(weakref.ref, kept)]
            self._rest = [(variable, 0) for variable in reversed(kept)]
        pieces = []
        while self._rest and nbytes > 0:
            variable, start = self._rest.pop()
            array = variable.own_copy()
            stop = min(array.size, start + max(1, nbytes // array.itemsize))
            pieces.append(Piece(variable, start, stop))
            nbytes -= (stop - start) * array.itemsize + _EACH
            if stop < array.size:
                self._rest.append((variable, stop))
        return pieces

    def all_pieces(self, world: Any) -> list[Piece]:
        """Return all variables that exist on all ranks, and end the pass. Collective."""
        self._rest = []
        return self.next_share(world, sys.maxsize)


def digest_of(pieces: Sequence[Piece]) -> int:
    """Return the digest of this rank's copies."""
    seed = 0
    for piece in pieces:
        seed = digest(as_bytes(piece.content).data, seed)
    return seed


def difference(topology: Topology, pieces: Sequence[Piece]) -> CorruptionError | None:
    """Return the error of all ranks for the first elements that differ; None if only the bits do. Collective."""
    world, blocks = topology.world, [*_blocks(pieces)]
    digests = world.allgather([digest_of([block]) for block in blocks])
    for block, *of_ranks in zip(blocks, *digests, strict=True):
        if len({*of_ranks}) == 1:
            continue
        copies = world.allgather(block.content)
        wrong = np.logical_or.reduce([~same(copies[0], copy) for copy in copies[1:]])
        if wrong.any():
            name, shape, start = block.variable.name, block.variable.own_copy().shape, block.start

            def element(i: int, start: int = start, shape: tuple[int, ...] = shape) -> tuple[int, ...]:
                return tuple(map(int, np.unravel_index(start + i, shape)))

            what = f"variable {name!r} is not the same on all ranks"
            return corruption(topology, name, what, copies, suspects(copies), wrong, element)
    return None


def _blocks(pieces: Sequence[Piece]) -> Iterator[Piece]:
    for variable, start, stop in pieces:
        for first in range(start, stop, _BLOCK):
            yield Piece(variable, first, min(first + _BLOCK, stop))
