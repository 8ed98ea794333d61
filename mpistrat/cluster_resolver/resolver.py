"""The base class of all resolvers, and the resolvers of clusters that the program gives."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
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

        The arguments exist for tf.distribute and are ignored. Other processes are not asked.
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
        return self._task_type or self._default("task_type")

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """Number of this process among the tasks of its job."""
        # As in tf.distribute, a task_id of 0 counts as not given: `or`, not a test for None.
        return self._task_id or self._default("task_id")

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """Protocol of the addresses that `master` returns; none by default."""
        return self._rpc_layer or self._default("rpc_layer")

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def _default(self, name: str) -> Any:
        """Return the task type, task id or layer to use if the program gave none, or 0."""
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


class SimpleClusterResolver(ClusterResolver):
    """A cluster that the program gives.

    Parameters
    ----------
    cluster_spec : ClusterSpec
        Tasks of the cluster.
    master : str
        Address that `master` returns if it is called without a task.
    task_type : str, optional
        Job of this process.
    task_id : int, optional
        Number of this process among the tasks of its job.
    environment : str
        Name of the environment.
    num_accelerators : mapping, optional
        Result of `num_accelerators`.
    rpc_layer : str, optional
        Protocol of the addresses that `master` returns.

    Raises
    ------
    TypeError
        If ``cluster_spec`` is not a ``ClusterSpec``, or ``master`` is not a string.

    Examples
    --------
    >>> cluster = ClusterSpec({"worker": ["a:8888", "b:8888"]})
    >>> resolver = SimpleClusterResolver(cluster, task_type="worker", task_id=1, rpc_layer="grpc")
    >>> resolver.master("worker", 0)
    'grpc://a:8888'
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ):
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(f"cluster_spec must be a ClusterSpec, not {cluster_spec!r}")
        if not isinstance(master, str):
            raise TypeError(f"master must be a string, not {master!r}")
        self._cluster_spec = cluster_spec
        self._master = master
        self._environment = environment
        self._num_accelerators = num_accelerators
        self.rpc_layer = rpc_layer
        self.task_type = task_type
        self.task_id = task_id

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster that was given."""
        return self._cluster_spec

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task; without a task, the ``master`` that was given.

        Raises
        ------
        ValueError
            If the cluster has no such task.
        """
        address = self._master
        if task_type is not None and task_id is not None:
            address = self._cluster_spec.task_address(task_type, task_id)
        return with_protocol(address, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Return the accelerators that were given; the arguments exist for tf.distribute and are ignored."""
        return dict(self._num_accelerators or {})

    @property
    def environment(self) -> str | None:
        """Name of the environment."""
        return self._environment


class UnionResolver(ClusterResolver):
    """The tasks of several resolvers. The first resolver tells the task of this process.

    A job of several resolvers has the tasks of all, one resolver after the other. If a resolver leaves out task
    numbers of a job, all tasks of that job keep their own numbers.

    Parameters
    ----------
    *resolvers : ClusterResolver
        Resolvers to merge.
    rpc_layer, task_type, task_id : optional
        Replace the values of the first resolver. As in tf.distribute, a ``task_id`` of 0 counts as not given.

    Raises
    ------
    ValueError
        If no resolver is given.
    TypeError
        If an argument is not a ``ClusterResolver``.

    Examples
    --------
    >>> from mpistrat.cluster_resolver import SimpleClusterResolver
    >>> union = UnionResolver(
    ...     SimpleClusterResolver(ClusterSpec({"worker": ["a:1"]}), task_type="worker", task_id=0),
    ...     SimpleClusterResolver(ClusterSpec({"worker": ["b:1"], "ps": ["c:1"]})),
    ... )
    >>> union.cluster_spec()
    ClusterSpec({'worker': ['a:1', 'b:1'], 'ps': ['c:1']})
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        rpc_layer: str | None = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ):
        if not resolvers:
            raise ValueError("UnionResolver needs at least one resolver")
        for resolver in resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(f"UnionResolver takes cluster resolvers, not {resolver!r}")
        self._resolvers = resolvers
        self.asks_a_service = any(resolver.asks_a_service for resolver in resolvers)
        self.rpc_layer = rpc_layer
        self.task_type = task_type
        self.task_id = task_id

    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks of all resolvers.

        Raises
        ------
        KeyError
            If two resolvers have a task of the same number in a job whose tasks keep their numbers.
        """
        clusters = [resolver.cluster_spec().as_dict() for resolver in self._resolvers]
        numbered = {job for cluster in clusters for job, tasks in cluster.items() if isinstance(tasks, dict)}
        merged: dict[str, Any] = {}
        for cluster in clusters:
            for job, tasks in cluster.items():
                if job not in numbered:
                    merged.setdefault(job, []).extend(tasks)
                    continue
                own = tasks if isinstance(tasks, dict) else dict(enumerate(tasks))
                there = merged.setdefault(job, {})
                twice = sorted(set(own) & set(there))
                if twice:
                    raise KeyError(f"job {job!r} has tasks {twice} in more than one of the resolvers")
                there.update(own)
        return ClusterSpec(merged)

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task; without a task, the master of the first resolver.

        Raises
        ------
        ValueError
            If the cluster has no such task.
        """
        if task_type is not None and task_id is not None:
            address = self.cluster_spec().task_address(task_type, task_id)
            return with_protocol(address, rpc_layer or self._rpc_layer)
        return self._resolvers[0].master(rpc_layer=rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Return the accelerators of the first resolver."""
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)

    @property
    def environment(self) -> str | None:
        """Name of the first resolver's environment."""
        return self._resolvers[0].environment

    def _default(self, name: str) -> Any:
        return getattr(self._resolvers[0], name)
