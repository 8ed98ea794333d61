"""The base class of all resolvers."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any

from mpistrat.cluster_resolver import gpus
from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
from mpistrat.cluster_resolver.placement import Placement, placement_of_task


class ClusterResolver(ABC):
    """The tasks of a cluster, and the task of this process.

    A subclass defines `cluster_spec`, and sets `task_type` and `task_id`.

    Attributes
    ----------
    reason : str
        Why `resolve` chose this resolver; empty for a resolver that the program made.

    Examples
    --------
    >>> class Fixed(ClusterResolver):
    ...     def cluster_spec(self):
    ...         return ClusterSpec({"worker": ["a:1", "b:1"]})
    >>> Fixed().master("worker", 1)
    'b:1'
    """

    reason: str = ""
    asks_a_service: bool = False  # over the network: then rank 0 asks, and broadcasts the answer
    _rpc_layer: str | None = ""
    _task_type: str | None = None
    _task_id: int | None = None

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks of the cluster, as they are now."""

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task, by default this one; an empty string if the task is unknown.

        Raises
        ------
        ValueError
            If the cluster has no such task.
        """
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        return with_protocol(self.cluster_spec().task_address(task_type, task_id), rpc_layer or self.rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Return the number of accelerators of each kind that this process sees.

        The arguments are those of tf.distribute and are ignored. Other processes are not asked.
        """
        count = gpus.count(os.environ)
        return {"GPU": count} if count else {}

    def tasks(self) -> dict[str, tuple[int, ...]]:
        """Return the task numbers of each job.

        Examples
        --------
        >>> from mpistrat.cluster_resolver import SimpleClusterResolver
        >>> SimpleClusterResolver(ClusterSpec({"worker": ["a:1", "b:1"], "ps": ["c:1"]})).tasks()
        {'worker': (0, 1), 'ps': (0,)}
        """
        cluster = self.cluster_spec()
        return {job: tuple(cluster.task_indices(job)) for job in cluster.jobs}

    @property
    def environment(self) -> str | None:
        """Name of the environment; empty by default."""
        return ""

    @property
    def task_type(self) -> str | None:
        """Job of this process."""
        return self._task_type or self._told("task_type")

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """Number of this process among the tasks of its job."""
        return self._task_id or self._told("task_id")

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """Protocol of the addresses that `master` returns; none by default."""
        return self._rpc_layer or self._told("rpc_layer")

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def _told(self, name: str) -> Any:
        """Return the task type, the task id or the layer where the program has given none, or 0."""
        return getattr(self, f"_{name}")

    @property
    def placement(self) -> Placement:
        """Place of this process among those that train together, with the source of each fact.

        Raises
        ------
        ValueError
            If the task of this process is not known, or does not train.
        """
        return placement_of_task(self.cluster_spec(), self.task_type, self.task_id)


def with_protocol(address: str, rpc_layer: str | None) -> str:
    """Return an address with its protocol."""
    return f"{rpc_layer}://{address}" if rpc_layer else address
