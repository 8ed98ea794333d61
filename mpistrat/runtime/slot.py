"""What upper rooms keep for the ranks of a communicator."""

from __future__ import annotations

from typing import Any


class Slot:
    """Something that a room above the topology keeps for its ranks. Get it by ``topology.slot(OwnClass)``.

    The topology makes one of each class, and knows nothing of its content.
    """

    def finish(self) -> None:
        """Wait for what is under way on this rank, at the end of the program. Nothing may be sent."""

    def close(self) -> None:
        """End what the ranks have in common. Called on all ranks: at the end of the program, and by `free`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self  # it belongs to the ranks, of which there are no copies
