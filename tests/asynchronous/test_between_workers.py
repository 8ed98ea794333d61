"""Programs that chief and workers all run, and the same strategy without other ranks."""

from pathlib import Path

import numpy as np
import pytest

import mpistrat
from mpistrat.cluster_resolver import ClusterSpec, SimpleClusterResolver
from mpistrat.compat.v1.experimental import ParameterServerStrategy

PROGRAM = Path(__file__).parent / "programs" / "between_workers.py"


@pytest.mark.mpich
@pytest.mark.parametrize(("n", "jobs"), [(2, "worker=1,ps=1"), (3, "chief=1,worker=1,ps=1"), (4, "worker=2,ps=2")])
def test_all_workers_run_the_program(run_ranks, n, jobs):
    ended = run_ranks(n, PROGRAM, jobs, limit=120).check()
    assert ended.output.count("all checks passed") == n - int(jobs[-1])


def test_alone():
    strategy = ParameterServerStrategy(SimpleClusterResolver(ClusterSpec({})))
    with strategy.scope():
        v = mpistrat.Variable([1.0, 2.0])
    strategy.run(lambda: v.assign_add([1.0, 1.0]))
    np.testing.assert_array_equal(v.read_value(), [2.0, 3.0])
    assert strategy.is_chief


@pytest.mark.parametrize(
    ("cluster", "text"),
    [
        ({"worker": ["a:1", "b:1"]}, "needs a ps"),
        ({"ps": ["a:1"]}, "needs a worker"),
        ({"chief": ["a:1", "b:1"], "ps": ["c:1"]}, "2 chiefs"),
        ({"worker": ["a:1"], "ps": ["c:1"], "evaluator": ["d:1"]}, "not evaluator"),
    ],
)
def test_clusters_that_do_not_fit(cluster, text):
    resolver = SimpleClusterResolver(ClusterSpec(cluster), task_type="worker", task_id=0)
    with pytest.raises(ValueError, match=text):
        ParameterServerStrategy(resolver)


def test_not_a_resolver():
    with pytest.raises(TypeError, match="must be a ClusterResolver"):
        ParameterServerStrategy("worker=2,ps=1")
