"""A strategy compares what its resolver says with what MPI says."""

import logging
from types import SimpleNamespace

import pytest
from mpi4py import MPI

from mpistrat import ClusterSpec, MultiWorkerMirroredStrategy
from mpistrat.cluster_resolver import (
    ClusterResolver,
    KubernetesClusterResolver,
    MpiClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
    compare,
    resolve,
)
from mpistrat.experimental import PreemptionCheckpointHandler

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def cluster(size):
    return ClusterSpec({"worker": [f"node{rank}:1" for rank in range(size)]})


def step(size, rank, nodes=1):
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % max(1, size // nodes)),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NODELIST": f"n[0-{nodes - 1}]",
        "SLURM_STEP_TASKS_PER_NODE": ",".join([str(size // nodes)] * nodes),
        "SLURM_DISTRIBUTION": "block",
    }


@pytest.mark.parametrize(
    "make",
    [
        resolve,
        lambda: MpiClusterResolver(MPI.COMM_WORLD),
        lambda: SlurmClusterResolver(environ=step(SIZE, RANK)),
        lambda: SimpleClusterResolver(cluster(SIZE), task_type="worker", task_id=RANK),
        lambda: SimpleClusterResolver(cluster(SIZE)),
        lambda: TFConfigClusterResolver(environ={}),
    ],
)
def test_agreement(make):
    strategy = MultiWorkerMirroredStrategy(make())
    assert strategy.reduce("SUM", 1, axis=None) == SIZE


@pytest.mark.parametrize(
    ("make", "texts"),
    [
        (
            lambda: SlurmClusterResolver(environ=step(SIZE + 3, RANK)),
            [f"size is {SIZE + 3} according to SLURM_STEP_NUM_TASKS, {SIZE} according to MPI"],
        ),
        (
            lambda: SimpleClusterResolver(cluster(SIZE + 1), task_type="worker", task_id=RANK),
            [f"size is {SIZE + 1} according to the cluster specification, {SIZE} according to MPI"],
        ),
    ],
)
def test_contradiction_on_every_rank(make, texts):
    with pytest.raises(RuntimeError) as error:
        MultiWorkerMirroredStrategy(make())
    for text in [*texts, "contradict each other", f"Rank {RANK}"]:
        assert text in str(error.value)


@pytest.mark.ranks(min=2)
def test_contradiction_on_one_rank():
    """TF_CONFIG was copied from task 0 to the last one, say: all ranks raise, and name it."""
    resolver = SimpleClusterResolver(cluster(SIZE), task_type="worker", task_id=0 if RANK == SIZE - 1 else RANK)
    with pytest.raises(RuntimeError) as error:
        MultiWorkerMirroredStrategy(resolver)
    said = f"Rank {SIZE - 1}: rank is 0 according to the cluster specification, {SIZE - 1} according to MPI"
    assert said in str(error.value)
    assert "index of its own task" in str(error.value)


@pytest.mark.ranks(min=2)
def test_nodes():
    environ = {**step(SIZE, RANK, nodes=2), "SLURM_STEP_TASKS_PER_NODE": f"{SIZE - 1},1"}
    with pytest.raises(
        RuntimeError, match=r"num_nodes is 2 according to SLURM_STEP_TASKS_PER_NODE, 1 acc.*one machine"
    ):
        MultiWorkerMirroredStrategy(SlurmClusterResolver(environ=environ))


@pytest.mark.ranks(min=2)
def test_resolver_that_fails_on_one_rank():
    class Broken(SimpleClusterResolver):
        def cluster_spec(self):
            if RANK == 1:
                raise ValueError("no such file")
            return super().cluster_spec()

    kind = ValueError if RANK == 1 else RuntimeError
    with pytest.raises(kind, match="no such file"):
        MultiWorkerMirroredStrategy(Broken(cluster(SIZE), task_type="worker", task_id=RANK))


@pytest.mark.ranks(min=2)
def test_part_of_the_job():
    """A resolver describes the communicator of the strategy, or the job it is a part of."""
    part = MPI.COMM_WORLD.Split(RANK == 0)
    for resolver in (
        MpiClusterResolver(part),
        resolve(),
        SimpleClusterResolver(cluster(SIZE), task_type="worker", task_id=RANK),
    ):
        assert isinstance(resolver, ClusterResolver)
        strategy = MultiWorkerMirroredStrategy(resolver, comm=part)
        assert strategy.num_replicas_in_sync == part.size
    found = MultiWorkerMirroredStrategy(comm=part).cluster_resolver
    assert (found.task_id, found.placement.size) == (part.rank, part.size)
    part.Free()


class Pods:
    """A service that counts how often it is asked."""

    def __init__(self, size):
        self.size = size
        self.asked = 0

    def list_pod_for_all_namespaces(self, label_selector):
        self.asked += 1
        if not self.size:
            raise ConnectionError("no answer")
        status = SimpleNamespace(phase="Running", host_ip="10.0.0.1")
        return SimpleNamespace(
            items=[SimpleNamespace(metadata=SimpleNamespace(name=f"pod{i}"), status=status) for i in range(self.size)]
        )


def in_pods(size):
    client = Pods(size)
    resolver = KubernetesClusterResolver(override_client=client)
    resolver.task_type, resolver.task_id = "worker", RANK
    return resolver, client


@pytest.mark.parametrize("union", [False, True])
def test_one_rank_asks_a_service(comm, union):
    """Not all, thousands of them at the same moment."""
    resolver, client = in_pods(SIZE)
    strategy = MultiWorkerMirroredStrategy(UnionResolver(resolver) if union else resolver)
    assert comm.allgather(client.asked) == [1] + [0] * (SIZE - 1)
    with strategy.scope():
        PreemptionCheckpointHandler(resolver, lambda: None)
    assert comm.allgather(client.asked) == [2] + [0] * (SIZE - 1)


def test_answer_of_a_service_is_compared_on_every_rank():
    with pytest.raises(RuntimeError, match=f"size is {SIZE + 1} according to the cluster specification"):
        MultiWorkerMirroredStrategy(in_pods(SIZE + 1)[0])


def test_service_that_does_not_answer():
    with pytest.raises(ConnectionError, match="no answer"):
        MultiWorkerMirroredStrategy(in_pods(0)[0])


@pytest.fixture
def environment(monkeypatch):
    """``environment(size)``: as if srun had said that there are so many tasks."""
    monkeypatch.setattr(compare, "_warned", set())

    def make(size):
        monkeypatch.setattr(
            compare, "resolve", lambda *environ: SlurmClusterResolver(environ=step(size, RANK), auto_set_gpu=False)
        )

    return make


def test_environment_that_is_not_used_is_warned_of_once(environment, caplog):
    environment(SIZE + 3)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            placement = MultiWorkerMirroredStrategy().cluster_resolver.placement
            assert (placement.launcher, placement.size) == ("MPI", SIZE)
    said = f"size is {SIZE + 3} according to SLURM_STEP_NUM_TASKS, {SIZE} according to MPI"
    assert [said in record.getMessage() for record in caplog.records] == [True] * (RANK == 0)


def test_environment_that_agrees_is_not_warned_of(environment, caplog):
    environment(SIZE)
    with caplog.at_level(logging.WARNING):
        assert MultiWorkerMirroredStrategy().cluster_resolver.placement.launcher == "srun"
    assert caplog.records == []


@pytest.mark.ranks(min=2)
def test_environment_of_the_whole_job_is_no_contradiction(environment, caplog):
    environment(SIZE)
    part = MPI.COMM_WORLD.Split(RANK == 0)
    with caplog.at_level(logging.WARNING):
        assert MultiWorkerMirroredStrategy(comm=part).cluster_resolver.placement.launcher == "MPI"
    assert caplog.records == []
    part.Free()
