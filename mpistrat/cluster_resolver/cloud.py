"""Resolvers of clouds: instances of Google Compute Engine, pods of Kubernetes, and the name of the one for TPUs."""

from __future__ import annotations

import enum
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
from mpistrat.cluster_resolver.resolver import ClusterResolver


class GCEClusterResolver(ClusterResolver):
    """The virtual machines of an instance group of Google Compute Engine. Each call asks the service again.

    Parameters
    ----------
    project, zone, instance_group : str
        Project, zone and name of the group.
    port : int
        Port of every task.
    task_type : str
        Job of all machines.
    task_id : int
        Number of this process among the tasks.
    rpc_layer : str or None
        Protocol of the addresses that `master` returns.
    credentials : google.auth.credentials.Credentials or str or None
        Credentials for the service; ``"default"`` for the machine's own.
    service : googleapiclient.discovery.Resource, optional
        Service to ask. By default the package ``google-api-python-client`` makes one.

    Raises
    ------
    ImportError
        If ``google-api-python-client`` is not installed, and no service is given.

    Examples
    --------
    >>> from unittest.mock import MagicMock
    >>> service = MagicMock()  # stands in for Google's
    >>> groups = service.instanceGroups()
    >>> groups.listInstances().execute.return_value = {"items": [{"instance": "zones/z/instances/w"}]}
    >>> groups.listInstances_next.return_value = None
    >>> machine = {"networkInterfaces": [{"networkIP": "10.0.0.3"}]}
    >>> service.instances().get().execute.return_value = machine
    >>> GCEClusterResolver("project", "z", "group", 7000, service=service).cluster_spec().as_dict()
    {'worker': ['10.0.0.3:7000']}
    """

    asks_a_service = True

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = "worker",
        task_id: int = 0,
        rpc_layer: str | None = "grpc",
        credentials: Any = "default",
        service: Any = None,
    ):
        self._project = project
        self._zone = zone
        self._instance_group = instance_group
        self._port = port
        self._service = _service(credentials) if service is None else service
        self.rpc_layer = rpc_layer
        self._task_type = task_type
        self.task_id = task_id

    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of the machines: internal IP address and port, sorted."""
        groups = self._service.instanceGroups()
        request = groups.listInstances(
            project=self._project,
            zone=self._zone,
            instanceGroup=self._instance_group,
            body={"instanceState": "RUNNING"},
            orderBy="name",
        )
        addresses = []
        while request is not None:  # the service returns the list in pages
            response = request.execute()
            for instance in response.get("items", ()):
                details = (
                    self._service.instances()
                    .get(project=self._project, zone=self._zone, instance=instance["instance"].rpartition("/")[2])
                    .execute()
                )
                addresses.append(f"{details['networkInterfaces'][0]['networkIP']}:{self._port}")
            request = groups.listInstances_next(previous_request=request, previous_response=response)
        return ClusterSpec({"worker" if self._task_type is None else self._task_type: sorted(addresses)})

    @property
    def task_type(self) -> str | None:
        """Job of all machines of the group. It cannot be set."""
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        raise RuntimeError(
            f"the task_type of a GCEClusterResolver cannot be set (to {task_type!r}): all machines of its group have "
            f"the job {self._task_type!r}; make another resolver"
        )


def _service(credentials: Any) -> Any:
    try:
        discovery: Any = importlib.import_module("googleapiclient.discovery")
    except ImportError as error:
        raise ImportError(
            "GCEClusterResolver needs the package google-api-python-client (pip install google-api-python-client), "
            "or a service: GCEClusterResolver(..., service=...)"
        ) from error
    if isinstance(credentials, str) and credentials == "default":
        credentials = None  # then the client takes the machine's own
    return discovery.build("compute", "v1", credentials=credentials)


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
        raise ValueError(f"executable_location must be a member of KubernetesExecutableLocation, not {location!r}")
    return client.CoreV1Api()


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

    def __new__(
        cls,
        tpu: str | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: Any = "default",
        service: Any = None,
        discovery_url: str | None = None,
    ) -> NoReturn:
        raise NotImplementedError(
            "there are no TPUs here: mpistrat runs one MPI rank per CPU or GPU device. Use "
            "MultiWorkerMirroredStrategy(), or TPUStrategy() without a resolver, whose devices are ranks, and "
            "`mpistrat.cluster_resolver.resolve()` to see the ranks and nodes"
        )

    @classmethod
    def connect(cls, tpu: str | None = None, zone: str | None = None, project: str | None = None) -> NoReturn:
        """Raise NotImplementedError."""
        cls()

    def get_master(self) -> NoReturn:
        """Raise NotImplementedError."""
        type(self)()

    def set_tpu_topology(self, serialized_tpu_topology: Any) -> NoReturn:
        """Raise NotImplementedError."""
        type(self)()

    def __exit__(self, type: Any, value: Any, traceback: Any) -> NoReturn:
        self.get_master()

    __enter__ = get_job_name = get_coordination_service_leader = get_tpu_system_metadata = get_master
    tpu_hardware_feature = property(get_master)
