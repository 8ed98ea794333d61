"""A resolver for the pods of a Kubernetes cluster."""

from __future__ import annotations

import enum
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
from mpistrat.cluster_resolver.resolver import ClusterResolver


class KubernetesExecutableLocation(enum.Enum):
    """Where this program runs, which selects the credentials.

    Examples
    --------
    >>> KubernetesExecutableLocation.WITHIN_CLUSTER
    <KubernetesExecutableLocation.WITHIN_CLUSTER: 0>
    """

    WITHIN_CLUSTER = 0
    """In a pod: with the pod's service account."""
    OFF_CLUSTER = 1
    """Elsewhere: with the user's kubeconfig."""


class KubernetesClusterResolver(ClusterResolver):
    """The pods of a Kubernetes cluster with given labels, sorted by name. Each call asks the service again.

    Parameters
    ----------
    job_to_label_mapping : mapping, optional
        Label selectors of the pods of each job; by default ``{"worker": ["job-name=tensorflow"]}``.
    tf_server_port : int
        Port of every task.
    rpc_layer : str or None
        Protocol of the addresses that `master` returns.
    override_client : kubernetes.client.CoreV1Api, optional
        Client to ask. By default the package ``kubernetes`` makes one.
    executable_location : KubernetesExecutableLocation
        Where this program runs.

    Raises
    ------
    ImportError
        If the package ``kubernetes`` is not installed, and no client is given.
    ValueError
        If ``executable_location`` is not a member of ``KubernetesExecutableLocation``.

    Examples
    --------
    >>> from types import SimpleNamespace as Is
    >>> pods = [Is(metadata=Is(name=f"w-{i}"), status=Is(phase="Running", host_ip=f"10.0.0.{i}")) for i in (2, 1)]
    >>> client = Is(list_pod_for_all_namespaces=lambda label_selector: Is(items=pods))
    >>> KubernetesClusterResolver(override_client=client).cluster_spec().as_dict()
    {'worker': ['10.0.0.1:8470', '10.0.0.2:8470']}
    """

    asks_a_service = True

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: KubernetesExecutableLocation = KubernetesExecutableLocation.WITHIN_CLUSTER,
    ):
        self._client = _client(executable_location) if override_client is None else override_client
        self._selectors = dict(job_to_label_mapping or {"worker": ["job-name=tensorflow"]})
        self._port = tf_server_port
        self.rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of the pods: IP address of the host, and port.

        Raises
        ------
        RuntimeError
            If a pod is not running.
        """
        return ClusterSpec(
            {
                job: [address for selector in selectors for address in self._addresses(selector)]
                for job, selectors in self._selectors.items()
            }
        )

    def _addresses(self, selector: str) -> list[str]:
        pods = self._client.list_pod_for_all_namespaces(label_selector=selector).items
        addresses = []
        for pod in sorted(pods, key=lambda pod: pod.metadata.name):
            if pod.status.phase != "Running":
                raise RuntimeError(
                    f"pod {pod.metadata.name!r} (selected by {selector!r}) is not running: its phase is "
                    f"{pod.status.phase!r}. Wait for this pod, or select other pods with job_to_label_mapping"
                )
            addresses.append(f"{pod.status.host_ip}:{self._port}")
        return addresses


def _client(location: KubernetesExecutableLocation) -> Any:
    try:
        config: Any = importlib.import_module("kubernetes.config")
        client: Any = importlib.import_module("kubernetes.client")
    except ImportError as error:
        raise ImportError(
            "KubernetesClusterResolver needs the package kubernetes (pip install kubernetes), or a client: "
            "KubernetesClusterResolver(override_client=...)"
        ) from error
    if location is KubernetesExecutableLocation.WITHIN_CLUSTER:
        config.load_incluster_config()
    elif location is KubernetesExecutableLocation.OFF_CLUSTER:
        config.load_kube_config()
    else:
        raise ValueError(
            f"executable_location must be a member of KubernetesExecutableLocation, not {location!r}"
        )
    return client.CoreV1Api()
