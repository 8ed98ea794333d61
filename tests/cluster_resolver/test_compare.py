"""Contradictions between a resolver and MPI, and the likely causes in messages."""

import pytest
from recorded import recorded

from mpistrat.cluster_resolver import (
    ClusterSpec,
    Placement,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    resolve,
)
from mpistrat.cluster_resolver.compare import contradictions, facts_of, facts_of_resolver, likely_cause


def known(*node_of_rank, rank=0):
    """Return the placement by MPI of ranks on these nodes."""
    nodes = list(dict.fromkeys(node_of_rank))
    where = [nodes.index(node) for node in node_of_rank]
    counts = tuple(map(where.count, range(len(nodes))))
    own = [each for each in range(len(where)) if where[each] == where[rank]]
    return Placement(
        "MPI",
        len(where),
        rank,
        node=where[rank],
        local_rank=own.index(rank),
        local_size=len(own),
        ranks_per_node=counts,
        node_of_rank=tuple(where),
    )


def names(told, mpi):
    return [each.name for each in contradictions(told, mpi)]


LAYOUTS = {
    "even": (0, 0, 1, 1, 2, 2),
    "uneven": (0, 0, 0, 1, 2),
    "cyclic": (0, 1, 2, 0, 1, 2),
    "arbitrary": (1, 0, 1, 2, 0),
    "gpus-per-task": (0, 0, 1, 1),
    "mpirun": (0, 0, 1, 1, 2, 2),
}


@pytest.mark.parametrize("folder", LAYOUTS)
def test_what_agrees(folder):
    layout = LAYOUTS[folder]
    for rank in range(len(layout)):
        told = facts_of_resolver(resolve(recorded(folder, rank)))
        assert contradictions(told, known(*layout, rank=rank)) == []
        assert {"size", "rank"} <= set(told)


def test_numbers_of_nodes_are_not_compared():
    assert (
        contradictions(facts_of_resolver(resolve(recorded("arbitrary", 1))), known("y", "x", "y", "z", "x", rank=1))
        == []
    )


@pytest.mark.parametrize(
    ("folder", "rank", "mpi", "expected", "cause"),
    [
        ("even", 2, known(0), ["size", "rank"], "started alone"),
        ("even", 2, known(0, 0, 1, rank=2), ["size"], "left over from another launch"),
        ("even", 2, known(0, 0, 1, 1, 2, 2, rank=3), ["rank", "local_rank"], "left over"),
        ("even", 2, known(*range(6), rank=2), ["num_nodes", "ranks_by_node", "local_size"], "container"),
        ("even", 2, known(*[0] * 6, rank=2), None, "one machine to MPI"),
        ("even", 3, known(0, 1, 2, 0, 1, 2, rank=3), ["ranks_by_node"], "spread over the nodes"),
    ],
)
def test_what_does_not(folder, rank, mpi, expected, cause):
    environ = recorded(folder, rank)
    found = contradictions(facts_of_resolver(resolve(environ)), mpi)
    assert found
    if expected is not None:
        assert [each.name for each in found] == expected
    assert cause in likely_cause(found, mpi, environ)


def test_resolver_of_another_launcher():
    """Under mpirun, SLURM_* describe the daemons of mpirun."""
    environ = recorded("mpirun", 3)
    mpi = known(0, 0, 1, 1, 2, 2, rank=3)
    found = contradictions(facts_of_resolver(SlurmClusterResolver(environ=dict(environ))), mpi)
    assert str(found[0]) == "size is 2 according to SLURM_STEP_NUM_TASKS, 6 according to MPI"
    cause = likely_cause(found, mpi, environ)
    assert "mpirun of Open MPI started this rank" in cause
    assert "resolve()" in cause


def test_assumptions_are_not_compared():
    environ = {name: text for name, text in recorded("mpirun", 3).items() if name != "PMIX_HOSTNAME"}
    told = facts_of_resolver(resolve(environ))
    assert "ranks_by_node" not in told
    assert names(told, known(0, 0, 1, 1, 2, 2, rank=3)) == []


def test_slots_are_an_assumption():
    """mpirun --map-by node:oversubscribe -n 5 where Slurm has 3, 1 and 1 slots: 2, 2 and 1 ranks."""
    environ = {**recorded("mpirun-uneven", 4), "OMPI_COMM_WORLD_RANK": "2", "PMIX_RANK": "2"}
    resolver = resolve(environ)
    assert resolver.placement.ranks_per_node == (3, 1, 1)
    assert resolver.placement.sources["ranks_per_node"].startswith("assumed: ")
    told = facts_of_resolver(resolver)
    assert {"size", "rank", "local_rank", "local_size"} == set(told)
    assert names(told, known(0, 1, 2, 0, 1, rank=2)) == []


WORKERS = ClusterSpec({"worker": ["localhost:1", "localhost:2"], "chief": ["a:1"], "ps": ["c:1"]})


class TestGivenClusters:
    def test_tasks_that_train_are_ranks(self):
        resolver = SimpleClusterResolver(WORKERS, task_type="worker", task_id=1)
        assert names(facts_of_resolver(resolver), known(0, 1, 2, rank=2)) == []
        assert names(facts_of_resolver(resolver), known(0, 0, 0, rank=2)) == []  # addresses may be aliases
        assert names(facts_of_resolver(resolver), known(0, 1, 2, rank=0)) == ["rank"]
        assert names(facts_of_resolver(resolver), known(0, 1, rank=1)) == ["size", "rank"]

    def test_a_worker_may_be_a_whole_node(self):
        resolver = SimpleClusterResolver(WORKERS, task_type="worker", task_id=1)
        assert names(facts_of_resolver(resolver), known(0, 0, 1, 1, 2, 2, rank=5)) == []

    def test_without_a_task_only_the_size_counts(self):
        told = facts_of_resolver(SimpleClusterResolver(WORKERS))
        assert set(told) == {"size"}
        assert names(told, known(0, 0, 0, rank=2)) == []
        assert names(told, known(0, 0)) == ["size"]

    def test_an_empty_cluster_says_nothing(self):
        for environ in ({}, {"TF_CONFIG": "{}"}):
            assert facts_of_resolver(TFConfigClusterResolver(environ=environ)) == {}
            assert facts_of_resolver(TFConfigClusterResolver(task_type="worker", task_id=0, environ=environ)) == {}

    def test_evaluator_is_alone(self):
        cluster = ClusterSpec({"worker": ["a:1", "b:1"], "evaluator": ["c:1"]})
        told = facts_of_resolver(SimpleClusterResolver(cluster, task_type="evaluator", task_id=0))
        assert names(told, known(0)) == []

    @pytest.mark.parametrize(
        ("mpi", "cause"),
        [
            (known(0), "mpirun -n 3 python"),
            (known(0, 0, 0, rank=0), "index of its own task"),
            (known(0, 0), "Every task that trains is one rank"),
        ],
    )
    def test_causes(self, mpi, cause):
        resolver = SimpleClusterResolver(WORKERS, task_type="worker", task_id=1)
        assert cause in likely_cause(contradictions(facts_of_resolver(resolver), mpi), mpi, {})


def test_what_mpi_does_not_say_is_not_compared():
    assert contradictions(facts_of(resolve(recorded("even", 2)).placement), Placement("MPI", 6, 2)) == []
