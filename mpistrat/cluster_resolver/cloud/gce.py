"""A resolver for an instance group of Google Compute Engine."""

from __future__ import annotations

import importlib
from typing import Any

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
        Credentials for the service; ``"default"`` for those of the machine.
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
        while request is not None:
            response = request.execute()
            for instance in response.get("items", ()):
                details = (
                    self._service.instances()
                    .get(
                        project=self._project,
                        zone=self._zone,
                        instance=instance["instance"].rpartition("/")[2],
                    )
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
