"""A resolver for a cluster that the program gives."""

from __future__ import annotations

from collections.abc import Mapping

from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
from mpistrat.cluster_resolver.resolver import ClusterResolver, with_protocol


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

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
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
        """Return the accelerators that were given; the arguments, those of tf.distribute, are ignored."""
        return dict(self._num_accelerators or {})

    @property
    def environment(self) -> str | None:
        """Name of the environment."""
        return self._environment
