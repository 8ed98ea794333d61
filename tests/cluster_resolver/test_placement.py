"""Placements of 80,000 ranks take seconds."""

import pytest

from mpistrat.cluster_resolver import ClusterSpec, Placement, SimpleClusterResolver, resolve
from mpistrat.cluster_resolver.compare import facts_of

NODES, EACH = 20_000, 4


def test_ranks_by_node_of_a_large_job():
    """The time grows with ranks, not with ranks times nodes: that would take half an hour."""
    where = tuple(rank % NODES for rank in range(NODES * EACH))
    by_node = Placement("srun", len(where), 0, node_of_rank=where).ranks_by_node
    assert len(by_node) == NODES
    assert by_node[5] == (5, NODES + 5, 2 * NODES + 5, 3 * NODES + 5)


def test_place_in_a_large_cluster():
    cluster = ClusterSpec({"worker": [f"n{rank % NODES}:{rank // NODES}" for rank in range(NODES * EACH)]})
    placement = SimpleClusterResolver(cluster, task_type="worker", task_id=NODES + 7).placement
    assert (placement.node, placement.local_rank, placement.local_size) == (7, 1, EACH)
    assert facts_of(placement)["size"].value == NODES * EACH


RANKS = NODES * EACH
STEP = {
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": f"n[0-{NODES - 1}]",
    "SLURM_STEP_NODELIST": f"n[0-{NODES - 1}]",
    "SLURM_STEP_TASKS_PER_NODE": f"{EACH}(x{NODES})",
    "SLURM_STEP_NUM_TASKS": str(RANKS),
    "SLURM_PROCID": str(RANKS - 1),
    "SLURMD_NODENAME": f"n{NODES - 1}",
    "SLURM_LOCALID": str(EACH - 1),
}
HYDRA = {"PMI_RANK": str(RANKS - 1), "PMI_SIZE": str(RANKS), "MPI_LOCALRANKID": str(EACH - 1)} | {
    "MPI_LOCALNRANKS": str(EACH)
}
LARGE = {
    "block": STEP,
    "cyclic": {**STEP, "SLURM_DISTRIBUTION": "cyclic"},
    "components": {
        **STEP,
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "n0",
        "SLURM_JOB_NODELIST_HET_GROUP_1": f"n[1-{NODES - 1}]",
    },
    "mpiexec": {**STEP, **HYDRA, "SLURM_EXTERNAL_LAUNCHER": "1", "SLURM_JOB_CPUS_PER_NODE": f"{EACH}(x{NODES})"}
    | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(NODES), "SLURM_STEP_TASKS_PER_NODE": f"1(x{NODES})"},
    "PBS": {**HYDRA, "PMI_HOSTNAME": f"n{NODES - 1}", "PBS_JOBID": "1", "PBS_NODEFILE": "{file}"},
}


@pytest.mark.full
@pytest.mark.parametrize("kind", LARGE)
def test_launch_of_many_ranks(kind, tmp_path):
    file = tmp_path / "nodes"
    file.write_text("".join(f"n{node}\n" * EACH for node in range(NODES)))
    resolver = resolve({name: value.replace("{file}", str(file)) for name, value in LARGE[kind].items()})
    placement = resolver.placement
    assert (placement.size, placement.rank, placement.num_nodes) == (RANKS, RANKS - 1, NODES)
    assert (placement.node, placement.local_rank, placement.local_size) == (NODES - 1, EACH - 1, EACH)
    assert resolver.cluster_spec().num_tasks("worker") == RANKS
