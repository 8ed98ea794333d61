"""What torch asks a process group about: its backend, ranks, name and description."""

from __future__ import annotations

import torch


class DescribedGroup(torch.distributed.ProcessGroup):
    """A process group without collectives.

    Parameters
    ----------
    rank, size : int
        The rank of this process in the group, and the number of ranks.
    name : str
        Torch's name of the group.
    """

    def __init__(self, rank: int, size: int, name: str):
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._name, self._description = name, ""

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return "mpistrat"

    def getRank(self) -> int:
        """Return the rank in this group."""
        return self._rank

    def getSize(self) -> int:
        """Return the number of ranks of this group."""
        return self._size

    rank, size, name = getRank, getSize, getBackendName

    def setGroupName(self, name: str) -> None:
        """Set torch's name of the group."""
        self._name = name

    def getGroupName(self) -> str:
        """Return torch's name of the group."""
        return self._name

    def setGroupDesc(self, description: str) -> None:
        """Set torch's description of the group."""
        self._description = description

    def getGroupDesc(self) -> str:
        """Return torch's description of the group."""
        return self._description

    @property
    def group_name(self) -> str:
        """Torch's name of the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """Torch's description of the group."""
        return self._description

    # torch asks a group for its devices, and for the backend of a device. A group in Python is its own backend, and
    # the C++ part would know neither.

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.device_count() else [])]

    def _get_backend(self, device: torch.device) -> DescribedGroup:
        return self

    supports_coalescing = supports_time_estimate = False
    supports_splitting = True

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Return at once: the ranks of a group are connected."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Return at once: a new group needs its members alone."""

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: torch allocates what FSDP sends."""
        return False

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def __repr__(self) -> str:
        return f"<mpistrat ProcessGroup {self._name!r}: rank {self.rank()} of {self.size()}>"
