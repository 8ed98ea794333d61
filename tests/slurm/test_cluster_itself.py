"""The test cluster: closed, gone afterwards, and clear about what it lacks."""

import contextlib
import os
import socket

import cluster as clusters
import pytest
from namespaces import wait_for

pytestmark = pytest.mark.timeout(900)


def networks_of(processes):
    """The networks that processes are in. One that has ended meanwhile is in none."""
    found = set()
    for each in processes:
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{each}/ns/net"))
    return found


def test_nothing_of_it_is_seen_from_outside(cluster):
    """Its processes are in a network of their own, and that has no way out."""
    networks = networks_of(cluster.processes())
    assert len(networks) == cluster.nodes + 1  # one that only has the bridge
    assert os.readlink("/proc/self/ns/net") not in networks
    routes = cluster.run("ip", "route").stdout.splitlines()
    assert [route.split()[0] for route in routes] == ["10.77.0.0/24"]
    assert cluster.run("hostname", node=1).stdout.strip() == "node1" != socket.gethostname()


def test_nothing_is_left_behind(cluster, monkeypatch):
    """Also when a cluster does not come up."""
    with clusters.Cluster(nodes=1) as small:
        assert small.directory.is_dir()
        assert small.processes()
    assert not small.directory.exists()
    wait_for(lambda: not small.processes(), "its processes to be gone", 30)
    monkeypatch.setattr(clusters, "CONFIGURATION", "nonsense")
    broken = clusters.Cluster(nodes=1)
    with pytest.raises(RuntimeError, match="Slurm did not start"):
        broken.__enter__()
    assert not broken.directory.exists()
    wait_for(lambda: not broken.processes(), "its processes to be gone", 30)


def test_apt_is_tried_twice(monkeypatch):
    """Where packages are missing and cannot be had, the tests fail by their names."""
    tried = []
    monkeypatch.setattr(clusters.shutil, "which", lambda name: None)
    monkeypatch.setattr(
        clusters.subprocess,
        "run",
        lambda step, **_: tried.append(step) or clusters.subprocess.CompletedProcess(step, 100, "no"),
    )
    with pytest.raises(RuntimeError, match=r"could not install slurmctld slurmd (.|\n)*no"):
        clusters.install()
    assert [step[-1] for step in tried if "install" in step] == ["util-linux"] * 2
