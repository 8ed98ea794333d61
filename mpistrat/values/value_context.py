"""What a function that makes per-replica values is told."""

from __future__ import annotations


class ValueContext:
    """Which replica a value is made for.

    Parameters
    ----------
    replica_id_in_sync_group : int
        The replica, counted over all processes.
    num_replicas_in_sync : int
        How many there are.

    Examples
    --------
    >>> ValueContext(1, 4)
    ValueContext(replica_id_in_sync_group=1, num_replicas_in_sync=4)
    """

    __slots__ = ("_num_replicas", "_replica_id")

    def __init__(self, replica_id_in_sync_group: int = 0, num_replicas_in_sync: int = 1):
        self._replica_id = replica_id_in_sync_group
        self._num_replicas = num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> int:
        """The replica that the value is for."""
        return self._replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas there are."""
        return self._num_replicas

    def __repr__(self) -> str:
        return (
            f"ValueContext(replica_id_in_sync_group={self._replica_id}, "
            f"num_replicas_in_sync={self._num_replicas})"
        )
