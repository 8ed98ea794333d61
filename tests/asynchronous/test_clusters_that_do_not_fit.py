"""A cluster that lacks a job is refused before any rank is waited for."""

import pytest

import mpistrat
from mpistrat.cluster_resolver import ClusterSpec, SimpleClusterResolver

WORKER, SERVER, CHIEF = {"worker": ["a:1"]}, {"ps": ["b:1"]}, {"chief": ["c:1"]}


@pytest.mark.parametrize(
    ("cluster", "text"),
    [
        (SERVER, "needs one chief, the coordinator; it has ps=1"),
        (WORKER | SERVER, "needs one chief"),
        (WORKER | SERVER | {"chief": ["c:1", "d:1"]}, "needs one chief, the coordinator; it has .*chief=2"),
        (CHIEF | SERVER, "needs a worker"),
        (CHIEF | WORKER, "needs a ps"),
        (CHIEF | WORKER | SERVER | {"evaluator": ["e:1"]}, "not evaluator"),
    ],
)
def test_a_strategy(cluster, text):
    resolver = SimpleClusterResolver(ClusterSpec(cluster), task_type="chief", task_id=0)
    with pytest.raises(ValueError, match=text):
        mpistrat.ParameterServerStrategy(resolver)


@pytest.mark.parametrize("cluster", [SERVER, WORKER])
def test_a_server_without_chief(cluster):
    (job,) = cluster
    with pytest.raises(RuntimeError, match="join\\(\\) serves a chief, the coordinator"):
        mpistrat.Server(cluster, job_name=job, task_index=0).join()
