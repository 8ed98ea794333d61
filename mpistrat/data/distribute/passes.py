"""The passes over one distributed dataset: where they are, and how they read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpistrat.data.distribute.autoshard import Division
from mpistrat.data.distribute.state import Position, resumed, state_of
from mpistrat.data.distribute.throughput_log import ThroughputLog
from mpistrat.data.options import AUTOTUNE
from mpistrat.data.pipeline.prefetch import Turns
from mpistrat.data.rows import spec
from mpistrat.data.rows.contracts import Peers
from mpistrat.runtime.device import Device


class Place:
    """Where an iterator is, which its dataset knows when the iterator is gone, too."""

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
        How many batches are read ahead; None and AUTOTUNE leave it to the library.

    Attributes
    ----------
    division, prefetch
        As above.
    device : Device
        Where batches are fetched to.
    turns : Turns
        Lets one thread at a time run the functions of the program.
    at_once : bool
        Whether the program did next to nothing between the batches of the last epoch.
    """

    def __init__(self, division: Division, peers: Peers, prefetch: int | None):
        self.division = division
        self.device = Device("cpu")
        self.prefetch = AUTOTUNE if prefetch is None else prefetch
        self.turns = Turns()
        self.at_once = False
        self._peers = peers
        # Equal on all replicas, as this is where they are in step.
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
        """The structure of this replica's batches."""
        of_plan = self.division.plan.element_spec()
        if self.division.replicas == 1 or self.division.plan.batch is None:
            return of_plan
        return spec.any_size(of_plan)

    def pace(self) -> ThroughputLog:
        """Return a log of the throughput of one pass."""
        return ThroughputLog(self._peers, self._number)

    def state(self) -> dict[str, Any]:
        """Return how far the newest pass has come."""
        return self.state_at(self._next if self._newest is None else self._newest.now())

    def state_at(self, position: Position) -> dict[str, Any]:
        """Return the state of a position."""
        return state_of(self.division, position)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on where a state was taken."""
        self.division, self._next = resumed(self.division, state)
        self._newest = None
