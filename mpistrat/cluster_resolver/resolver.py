"""What every resolver can answer."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod

from mpistrat.cluster_resolver import gpus
from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
from mpistrat.cluster_resolver.placement import Placement, placement_of_task


class ClusterResolver(ABC):
    """Who the tasks of a cluster are, and which of them this process is.

    A subclass answers `cluster_spec` and `master`, and sets `task_type` and `task_id`.

    Attributes
    ----------
    reason : str
        Why `resolve` chose this resolver; empty if it did not.

    Examples
    --------
    >>> class Fixed(ClusterResolver):
    ...     def cluster_spec(self):
    ...         return ClusterSpec({"worker": ["a:1", "b:1"]})
    ...
    ...     def master(self, task_type=None, task_id=None, rpc_layer=None):
    ...         return self.cluster_spec().task_address(task_type or "worker", task_id or 0)
    >>> Fixed().master("worker", 1)
    'b:1'
    """

    reason: str = ""
    _asks_a_service: bool = False  # over the network: then one rank asks, and tells the others
    _task_type: str | None = None
    _task_id: int | None = None

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """The tasks of the cluster, as they are now."""

    @abstractmethod
    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """The address of a task, by default that of this one, with the protocol before it if there is one."""

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """How many accelerators of each kind a task has: here what this process sees.

        The arguments are there for the sake of tf.distribute; nothing is asked of other processes.
        """
        count = gpus.count(os.environ)
        return {"GPU": count} if count else {}

    @property
    def environment(self) -> str | None:
        """The name of the environment, empty if it has none."""
        return ""

    @property
    def task_type(self) -> str | None:
        """The job that this process belongs to."""
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """Which of the job's tasks this process is."""
        return self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def placement(self) -> Placement:
        """Where this process is among those that train together, and how that is known.

        Raises
        ------
        ValueError
            If it is not known which task this process is, or it is one that does not train.
        """
        return placement_of_task(self.cluster_spec(), self.task_type, self.task_id)


def with_protocol(address: str, rpc_layer: str | None) -> str:
    """An address with its protocol.

    Examples
    --------
    >>> with_protocol("a:8888", "grpc"), with_protocol("a:8888", None)
    ('grpc://a:8888', 'a:8888')
    """
    return f"{rpc_layer}://{address}" if rpc_layer else address
