"""Elastic jobs that lose a node or a daemon: they end with the bits of a job on one node without a loss."""

import json
import re
import sys

import pytest

from tests.conftest import ROOT, run_program
from tests.training.elastic.conftest import PROGRAM, result

LIMIT = 200
pytestmark = [pytest.mark.fault, pytest.mark.timeout(900)]
HOSTS = "node0:2,node1:2,node2:2,node3:2"


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    command = [sys.executable, "-m", "mpistrat", "run", "-n", "2", str(PROGRAM), str(folder), "[]"]
    return result(run_program(command, LIMIT, ROOT, REPLICAS="8"))


@pytest.fixture
def run(cluster, tmp_path):
    def run(losses, *options):
        environ = {
            "PRTE_MCA_plm_ssh_agent": f"{cluster.directory}/ssh",
            "OMPI_MCA_osc": "^ucx",
            "OMPI_MCA_mpi_yield_when_idle": "1",  # the nodes share the cores
            "HYDRA_LAUNCHER": "ssh",
            "HYDRA_LAUNCHER_EXEC": f"{cluster.directory}/ssh",
            "HYDRA_IFACE": "eth0",
            "UCX_TLS": "tcp,self",
            "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
            "TMPDIR": str(cluster.directory),
            "NODES": str(cluster.directory),
            "REPLICAS": "8",
        }
        command = [sys.executable, "-m", "mpistrat", "run", "--hosts", HOSTS, *options, str(PROGRAM), str(tmp_path)]
        return cluster.run_on(0, *command, json.dumps(losses), limit=LIMIT, environ=environ)

    yield run
    for node, holder in enumerate(cluster.holders):
        cluster.write(f"node{node}", str(holder))


@pytest.mark.mpich
@pytest.mark.parametrize(("mode", "ranks"), [pytest.param("same", 8, marks=pytest.mark.full), ("fewer", 6)])
def test_a_node_is_lost(cluster, run, undisturbed, mode, ranks):
    ended = run([("step:9", [3], "node")], "--elastic", mode)
    assert ended.returncode == 0, ended.stdout
    assert undisturbed in ended.stdout
    assert re.search(rf"goes on after the loss of node1 with {ranks} ranks, from the copy of step [89]", ended.stdout)
