"""The name of tf.distribute's resolver for TPUs, which this library does not support."""

from __future__ import annotations

from typing import Any, NoReturn

from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
from mpistrat.cluster_resolver.resolver import ClusterResolver


class TPUClusterResolver(ClusterResolver):
    """The name of tf.distribute's resolver for TPUs. Creating one raises NotImplementedError.

    Parameters
    ----------
    tpu, zone, project, job_name, coordinator_name, coordinator_address, credentials, service, discovery_url
        As in tf.distribute; all are ignored.

    Raises
    ------
    NotImplementedError
        Always.

    Examples
    --------
    >>> TPUClusterResolver()
    Traceback (most recent call last):
    NotImplementedError: ...
    """

    def __init__(
        self,
        tpu: str | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: Any = "default",
        service: Any = None,
        discovery_url: str | None = None,
    ):
        _refuse()

    @staticmethod
    def connect(tpu: str | None = None, zone: str | None = None, project: str | None = None) -> NoReturn:
        """Raise NotImplementedError."""
        _refuse()

    def cluster_spec(self) -> ClusterSpec:
        """Raise NotImplementedError."""
        _refuse()

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Raise NotImplementedError."""
        _refuse()

    def get_master(self) -> str:
        """Raise NotImplementedError."""
        _refuse()

    def get_job_name(self) -> str | None:
        """Raise NotImplementedError."""
        _refuse()

    def get_coordination_service_leader(self) -> str | None:
        """Raise NotImplementedError."""
        _refuse()

    def get_tpu_system_metadata(self) -> Any:
        """Raise NotImplementedError."""
        _refuse()

    def set_tpu_topology(self, serialized_tpu_topology: Any) -> None:
        """Raise NotImplementedError."""
        _refuse()

    @property
    def tpu_hardware_feature(self) -> Any:
        """Raise NotImplementedError."""
        _refuse()

    def __enter__(self) -> NoReturn:
        _refuse()

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        return None


def _refuse() -> NoReturn:
    raise NotImplementedError(
        "there are no TPUs here: mpistrat runs one MPI rank per CPU or GPU device. Use "
        "MultiWorkerMirroredStrategy(), and `mpistrat.cluster_resolver.resolve()` to see the ranks and nodes"
    )
