"""Objects that other packages keep for the ranks of a communicator."""

from __future__ import annotations

from typing import Any


class Slot:
    """The base class of objects that other packages keep in a topology: one of each, by ``topology.slot(OwnClass)``."""

    def finish(self) -> None:
        """Wait for this rank's pending work at the end of the program. Must not send messages."""

    def close(self) -> None:
        """Release what the ranks share. Called on all ranks: at the end of the program, and by `Topology.free`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self  # it belongs to the ranks, which are not copied
