"""Specifications of clusters."""

import json

import pytest

from mpistrat.cluster_resolver import ClusterSpec

CLUSTER = {"worker": ["a:1", "b:2"], "ps": {3: "c:3", 1: "d:4"}}


def test_questions():
    spec = ClusterSpec(CLUSTER)
    assert spec.jobs == ["worker", "ps"]
    assert [spec.num_tasks(job) for job in spec.jobs] == [2, 2]
    assert [spec.task_indices(job) for job in spec.jobs] == [[0, 1], [1, 3]]
    assert spec.job_tasks("worker") == ["a:1", "b:2"]
    assert spec.job_tasks("ps") == [None, "d:4", None, "c:3"]
    assert spec.task_address("ps", 3) == "c:3"
    assert spec.as_dict() == CLUSTER


def test_full_numbers_become_a_list():
    assert ClusterSpec({"ps": {1: "b:1", 0: "a:1"}, "x": []}).as_dict() == {"ps": ["a:1", "b:1"], "x": []}
    assert ClusterSpec({"ps": {"2": "a:1"}}).as_dict() == {"ps": {2: "a:1"}}  # JSON has string keys


def test_changing_an_answer_changes_nothing():
    spec = ClusterSpec(CLUSTER)
    spec.as_dict()["worker"].append("x:1")
    spec.as_dict()["ps"].clear()
    spec.job_tasks("worker").clear()
    assert spec == ClusterSpec(CLUSTER)


@pytest.mark.parametrize("cluster", [{}, CLUSTER, {"job": ["a:1"]}, {"job": [], "ps": []}])
def test_copies_and_forms(cluster):
    spec = ClusterSpec(cluster)
    assert ClusterSpec(spec) == spec
    assert ClusterSpec(spec.as_dict()) == spec
    assert ClusterSpec(spec.as_cluster_def()) == spec
    assert json.loads(json.dumps(spec.as_cluster_def())) == spec.as_cluster_def()
    assert bool(spec) is bool(cluster)
    assert eval(repr(spec)) == spec


def test_equality():
    assert ClusterSpec(CLUSTER) == ClusterSpec({"ps": {1: "d:4", 3: "c:3"}, "worker": {0: "a:1", 1: "b:2"}})
    assert ClusterSpec(CLUSTER) != ClusterSpec({"worker": ["a:1", "b:2"]})
    assert ClusterSpec(CLUSTER) != CLUSTER


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda spec: spec.num_tasks("chief"), "no job 'chief': it has \\['worker', 'ps'\\]"),
        (lambda spec: spec.task_indices("chief"), "no job 'chief'"),
        (lambda spec: spec.job_tasks("chief"), "no job 'chief'"),
        (lambda spec: spec.task_address("chief", 0), "no job 'chief'"),
        (lambda spec: spec.task_address("ps", 0), "job 'ps' has no task 0: it has \\[1, 3\\]"),
    ],
)
def test_no_such_task(ask, text):
    with pytest.raises(ValueError, match=text):
        ask(ClusterSpec(CLUSTER))


@pytest.mark.parametrize(
    ("cluster", "error", "text"),
    [
        (["a:1"], TypeError, "dict from names of jobs"),
        (None, TypeError, "not None"),
        ({"worker": "a:1"}, TypeError, "tasks of job 'worker'"),
        ({"worker": [1]}, TypeError, "address of task 0 of job 'worker'"),
        ({1: ["a:1"]}, TypeError, "name of a job"),
        ({"worker": {"x": "a:1"}}, ValueError, "not 'x'"),
        ({"worker": {-1: "a:1"}}, ValueError, "not -1"),
    ],
)
def test_no_cluster(cluster, error, text):
    with pytest.raises(error, match=text):
        ClusterSpec(cluster)
