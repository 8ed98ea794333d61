"""All ranks agree on their roles, or all of them raise."""

import pytest

from mpistrat.cluster_resolver import ClusterSpec, MpiClusterResolver, SimpleClusterResolver
from mpistrat.cluster_resolver.compare import agreed_roles
from mpistrat.runtime.topology import Topology


@pytest.fixture
def topology(comm):
    return Topology.of(comm)


def jobs_for(size):
    """As many tasks as ranks, of up to three jobs."""
    return {"chief": 1, "worker": max(0, size - 2), "ps": int(size > 1)}


def given(size, job, task):
    """A cluster that the program gives, with names in another order than the ranks."""
    tasks = {job: [f"h{i}:1" for i in range(n)] for job, n in reversed(jobs_for(size).items())}
    return SimpleClusterResolver(ClusterSpec(tasks), task_type=job, task_id=task)


def test_ranks_in_the_order_of_the_jobs(comm, topology):
    resolver = MpiClusterResolver(comm, jobs=jobs_for(comm.size))
    for _ in range(2):
        roles = agreed_roles(resolver, topology)
        assert roles == resolver.roles
        assert roles.task_of(comm.rank) == (resolver.task_type, resolver.task_id)
        assert roles.chief == 0


def test_every_rank_tells_its_own_task(comm, topology):
    """A cluster in TF_CONFIG may give the tasks to the ranks in any order."""
    size = comm.size
    tasks = [(job, i) for job, n in jobs_for(size).items() for i in range(n)][::-1]
    roles = agreed_roles(given(size, *tasks[comm.rank]), topology)
    assert roles.chief == size - 1
    assert [roles.rank_of(*task) for task in tasks] == list(range(size))


def test_spread(comm, topology):
    nodes = len(topology.nodes)
    if comm.size > nodes:
        resolver = MpiClusterResolver(comm, jobs={"worker": comm.size - nodes, "ps": nodes}, spread="ps")
        assert agreed_roles(resolver, topology).parameter_servers == tuple(max(each) for each in topology.nodes)
    with pytest.raises(ValueError, match="the ranks are on"):
        MpiClusterResolver(comm, jobs={"ps": comm.size, "worker": 0, "x": 0}, spread="worker")


@pytest.mark.parametrize("odd", ["first", "last"])
def test_jobs_that_differ(comm, topology, odd):
    size, here = comm.size, (0 if odd == "first" else comm.size - 1) == comm.rank
    jobs = {"worker": size} if here else {"chief": 1, "worker": size - 1}
    resolver = MpiClusterResolver(comm, jobs=jobs)
    if size == 1:
        assert agreed_roles(resolver, topology).workers == (0,)
        return
    with pytest.raises(RuntimeError, match=r"the ranks have different jobs: rank.*: .*worker=.*; rank"):
        agreed_roles(resolver, topology)


def test_tasks_that_do_not_fit(comm, topology):
    size = comm.size
    for own, text in (
        (("chief", 0), "task 0 of job 'chief' must be one rank, and is ranks 0-"),
        (("cook", 1), "rank 0 has no role: its task is 1 of job 'cook', and the jobs are"),
        ((None, None), "rank 0 has no role"),
        (("worker", size), "rank 0 has no role"),
    ):
        if size == 1 and own == ("chief", 0):
            continue
        with pytest.raises(RuntimeError, match=text):
            agreed_roles(given(size, *own), topology)


def test_a_task_without_a_rank(comm, topology):
    spec = ClusterSpec({"worker": [f"h{i}:1" for i in range(comm.size + 1)]})
    with pytest.raises(RuntimeError, match=f"task {comm.size} of job 'worker' must be one rank, and is none of"):
        agreed_roles(SimpleClusterResolver(spec, task_type="worker", task_id=comm.rank), topology)


def test_numbers_with_gaps(comm, topology):
    spec = ClusterSpec({"worker": {2 * i + 1: f"h{i}:1" for i in range(comm.size)}})
    with pytest.raises(RuntimeError, match="numbered from 0 on without gaps"):
        agreed_roles(SimpleClusterResolver(spec, task_type="worker", task_id=2 * comm.rank + 1), topology)


def test_a_resolver_that_fails_on_one_rank(comm, topology):
    class Failing(SimpleClusterResolver):
        def tasks(self):
            if comm.rank == comm.size - 1:
                raise KeyError("no such machine")
            return super().tasks()

    error = KeyError if comm.rank == comm.size - 1 else RuntimeError
    with pytest.raises(error, match="no such machine"):
        agreed_roles(Failing(ClusterSpec({"worker": ["h:1"]}), task_type="worker", task_id=0), topology)
    assert comm.allreduce(1) == comm.size


def test_not_a_resolver(topology):
    with pytest.raises(TypeError, match="must be a ClusterResolver object, not 3"):
        agreed_roles(3, topology)
