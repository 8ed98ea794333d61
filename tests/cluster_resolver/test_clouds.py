"""Resolvers for Kubernetes and Google Compute Engine, with clients that answer from memory, and for TPUs."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from mpistrat.cluster_resolver import (
    GCEClusterResolver,
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
    TPUClusterResolver,
)


class Pods:
    """The part of ``kubernetes.client.CoreV1Api`` that the resolver uses."""

    def __init__(self, **pods):
        self.pods = pods

    def list_pod_for_all_namespaces(self, label_selector):
        items = [
            SimpleNamespace(metadata=SimpleNamespace(name=name), status=SimpleNamespace(phase=phase, host_ip=address))
            for name, address, phase in self.pods[label_selector]
        ]
        return SimpleNamespace(items=items)


class TestKubernetes:
    def test_default_job(self):
        pods = Pods(**{"job-name=tensorflow": [("b", "10.0.0.2", "Running"), ("a", "10.0.0.9", "Running")]})
        resolver = KubernetesClusterResolver(override_client=pods)
        assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.9:8470", "10.0.0.2:8470"]}
        assert resolver.master() == ""
        assert resolver.master("worker", 1) == "grpc://10.0.0.2:8470"
        resolver.task_type, resolver.task_id = "worker", 0
        assert resolver.master(rpc_layer="x") == "x://10.0.0.9:8470"
        assert resolver.placement.size == 2

    def test_jobs(self):
        pods = Pods(w=[("w", "1.1.1.1", "Running")], v=[("v", "2.2.2.2", "Running")], p=[])
        resolver = KubernetesClusterResolver({"worker": ["w", "v"], "ps": ["p"]}, 99, override_client=pods)
        assert resolver.cluster_spec().as_dict() == {"worker": ["1.1.1.1:99", "2.2.2.2:99"], "ps": []}

    def test_pod_is_not_running(self):
        pods = Pods(w=[("w-0", None, "Pending")])
        resolver = KubernetesClusterResolver({"worker": ["w"]}, override_client=pods)
        with pytest.raises(RuntimeError, match=r"pod 'w-0' .* is not running: its phase is 'Pending'"):
            resolver.cluster_spec()

    def test_package_is_missing(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "kubernetes", None)
        with pytest.raises(ImportError, match="pip install kubernetes"):
            KubernetesClusterResolver()

    @pytest.mark.parametrize(
        ("location", "called"), [("WITHIN_CLUSTER", "load_incluster_config"), ("OFF_CLUSTER", "load_kube_config")]
    )
    def test_package_is_used(self, location, called, monkeypatch):
        calls = []
        config, client = ModuleType("kubernetes.config"), ModuleType("kubernetes.client")
        for name in ("load_incluster_config", "load_kube_config"):
            setattr(config, name, lambda name=name: calls.append(name))
        client.CoreV1Api = lambda: Pods(w=[("w", "1.1.1.1", "Running")])
        monkeypatch.setitem(sys.modules, "kubernetes", ModuleType("kubernetes"))
        monkeypatch.setitem(sys.modules, "kubernetes.config", config)
        monkeypatch.setitem(sys.modules, "kubernetes.client", client)
        location = KubernetesExecutableLocation[location]
        resolver = KubernetesClusterResolver({"worker": ["w"]}, executable_location=location)
        assert calls == [called]
        assert resolver.cluster_spec().as_dict() == {"worker": ["1.1.1.1:8470"]}
        with pytest.raises(ValueError, match="member of KubernetesExecutableLocation"):
            KubernetesClusterResolver(executable_location="moon")


class Request:
    def __init__(self, answer):
        self.answer = answer

    def execute(self):
        return self.answer


class Compute:
    """The part of the Compute Engine's service that the resolver uses, with one instance per page."""

    def __init__(self, **addresses):
        self.addresses = addresses

    def instanceGroups(self):
        return self

    def instances(self):
        return self

    def listInstances(self, project, zone, instanceGroup, body, orderBy):
        assert (project, zone, instanceGroup) == ("p", "z", "g")
        self.pages = [Request({"items": [{"instance": f"https://g/z/{name}"}]}) for name in self.addresses]
        self.pages.append(Request({}))
        return self.pages.pop(0)

    def listInstances_next(self, previous_request, previous_response):
        return self.pages.pop(0) if self.pages else None

    def get(self, project, zone, instance):
        assert (project, zone) == ("p", "z")
        return Request({"networkInterfaces": [{"networkIP": self.addresses[instance]}]})


class TestGCE:
    def test_answers(self):
        service = Compute(one="10.0.0.3", two="10.0.0.2")
        resolver = GCEClusterResolver("p", "z", "g", 7000, task_id=1, service=service)
        assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.2:7000", "10.0.0.3:7000"]}
        assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "grpc")
        assert resolver.master() == "grpc://10.0.0.3:7000"
        resolver.rpc_layer, resolver.task_id = None, 0
        assert resolver.master() == "10.0.0.2:7000"
        assert resolver.placement.rank == 0

    def test_job_is_fixed(self):
        resolver = GCEClusterResolver("p", "z", "g", 7000, "ps", service=Compute(one="10.0.0.3"))
        assert resolver.cluster_spec().as_dict() == {"ps": ["10.0.0.3:7000"]}
        with pytest.raises(RuntimeError, match="cannot be set"):
            resolver.task_type = "worker"

    def test_package_is_missing(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "googleapiclient", None)
        with pytest.raises(ImportError, match="pip install google-api-python-client"):
            GCEClusterResolver("p", "z", "g", 7000)

    @pytest.mark.parametrize(("given", "passed"), [("default", None), (None, None), ("key", "key")])
    def test_package_is_used(self, given, passed, monkeypatch):
        discovery = ModuleType("googleapiclient.discovery")
        discovery.build = lambda *what, credentials: (what, credentials)
        monkeypatch.setitem(sys.modules, "googleapiclient", ModuleType("googleapiclient"))
        monkeypatch.setitem(sys.modules, "googleapiclient.discovery", discovery)
        resolver = GCEClusterResolver("p", "z", "g", 7000, credentials=given)
        assert resolver._service == (("compute", "v1"), passed)


def test_tpu():
    for use in (TPUClusterResolver, TPUClusterResolver.connect, lambda: TPUClusterResolver("local", zone="z")):
        with pytest.raises(NotImplementedError, match=r"no TPUs here.*MultiWorkerMirroredStrategy"):
            use()
