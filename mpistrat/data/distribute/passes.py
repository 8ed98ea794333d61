"""The passes over one distributed dataset: their positions and their options of reading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpistrat.data.distribute.autoshard import Division
from mpistrat.data.distribute.state import Position, resumed, state_of
from mpistrat.data.distribute.throughput_log import ThroughputLog
from mpistrat.data.options import AUTOTUNE
from mpistrat.data.pipeline.prefetch import MakingLock
from mpistrat.data.rows import spec
from mpistrat.data.rows.contracts import Peers
from mpistrat.runtime.device import Device


class Place:
    """Position of an iterator. The dataset keeps it after the iterator is gone."""

    __slots__ = ("position", "step")

    def __init__(self, position: Position):
        self.position, self.step = position, position.step

    def now(self) -> Position:
        """Return the position after the steps that were made."""
        return self.position._replace(step=self.step)


class Passes:
    """The state that a distributed dataset shares with its iterators.

    Parameters
    ----------
    division : Division
        The rows of each replica.
    peers : Peers
        The replicas that share the dataset.
    prefetch : int or None
        Number of batches that are read ahead. With None and AUTOTUNE the library chooses.

    Attributes
    ----------
    division, prefetch
        As above.
    device : Device
        The device to which batches are fetched.
    making : MakingLock
        A lock: one thread at a time runs the functions of the program.
    in_line : bool
        Whether the program made the batches of the last epoch itself, because a thread would have won nothing. Assumed
        for the first epoch, unless it asked for read-ahead: two threads that read compete for memory and the GIL, and
        being wrong costs two reads.
    """

    def __init__(self, division: Division, peers: Peers, prefetch: int | None):
        self.division = division
        self.device = Device("cpu")
        self.prefetch = AUTOTUNE if prefetch is None else prefetch
        self.making = MakingLock()
        automatic = prefetch is None or prefetch == AUTOTUNE
        self.in_line = automatic and not division.communicates
        self._peers = peers
        # Equal on all replicas, because making a distributed dataset is collective.
        self._number: int = getattr(peers, "sequence", 0)
        self._next = Position(division, 0)
        self._newest: Place | None = None

    def begin(self) -> Place:
        """Begin the next pass, and return its place."""
        self._newest = Place(self._next)
        self._next = Position(self.division, self._next.epoch + 1)
        return self._newest

    @property
    def element_spec(self) -> Any:
        """Structure of this replica's batches."""
        of_plan = self.division.plan.element_spec()
        if self.division.replicas == 1 or self.division.plan.batch is None:
            return of_plan
        return spec.any_size(of_plan)

    def pace(self) -> ThroughputLog:
        """Return a log of the throughput of one pass."""
        return ThroughputLog(self._peers, self._number)

    def state(self) -> dict[str, Any]:
        """Return the state of the newest pass."""
        return self.state_at(self._next if self._newest is None else self._newest.now())

    def state_at(self, position: Position) -> dict[str, Any]:
        """Return the state of a position."""
        return state_of(self.division, position)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Let the next pass continue at the position of a state."""
        self.division, self._next = resumed(self.division, state)
        self._newest = None
