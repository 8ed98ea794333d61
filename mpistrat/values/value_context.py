"""The argument of functions that make per-replica values."""

from __future__ import annotations


class ValueContext:
    """The replica that a value is made for.

    Parameters
    ----------
    replica_id_in_sync_group : int
        Number of the replica, counted over all processes.
    num_replicas_in_sync : int
        Number of replicas.

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
        """Number of the replica that the value is for."""
        return self._replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas."""
        return self._num_replicas

    def __repr__(self) -> str:
        return (
            f"ValueContext(replica_id_in_sync_group={self._replica_id}, "
            f"num_replicas_in_sync={self._num_replicas})"
        )
