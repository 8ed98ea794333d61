"""Resolvers find the nodes, ranks and GPUs of every recorded launch."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from recorded import FOLDERS, recorded

from mpistrat.cluster_resolver import MpiClusterResolver, SlurmClusterResolver, resolve

ALL = ("node0", "node1", "node2")
TWO = ("node0", "node1")


class Launch(NamedTuple):
    """The facts of a launch: its nodes, the node of each rank, and the GPUs.

    ``gpus`` has, for each rank of a node, the GPUs that it sees and its own GPU.
    """

    kind: type
    nodes: tuple[str, ...] | None
    node_of_rank: tuple[int, ...]
    gpus: tuple[tuple[tuple[str, ...], str], ...] | None = None


SEE_BOTH = ((("0", "1"), "0"), (("0", "1"), "1"))
SEE_ONE = ((("0",), "0"), (("1",), "1"))
FIRST_OF_BOTH = ((("0", "1"), "0"),)
Slurm, Mpi = SlurmClusterResolver, MpiClusterResolver

LAUNCHES = {
    # srun -N3 --ntasks-per-node=2; -N3 -n5; -n1
    "even": Launch(Slurm, ALL, (0, 0, 1, 1, 2, 2)),
    "uneven": Launch(Slurm, ALL, (0, 0, 0, 1, 2)),
    "single": Launch(Slurm, ("node0",), (0,)),
    # srun -m cyclic, -m plane=2, -m arbitrary (node1, node0, node1, node2, node0)
    "cyclic": Launch(Slurm, ALL, (0, 1, 2, 0, 1, 2)),
    "cyclic-uneven": Launch(Slurm, ALL, (0, 1, 2, 0, 0, 0, 0)),
    "plane": Launch(Slurm, TWO, (0, 0, 1, 0)),
    "arbitrary": Launch(Slurm, ALL, (1, 0, 1, 2, 0)),
    # the script of sbatch -N3 --ntasks-per-node=2 --gpus-per-node=2, srun in it, srun on two of the nodes
    "batch": Launch(Mpi, ("node0",), (0,), FIRST_OF_BOTH),
    "batch-srun": Launch(Slurm, ALL, (0, 0, 1, 1, 2, 2), SEE_BOTH),
    "batch-srun-part": Launch(Slurm, TWO, (0, 1), FIRST_OF_BOTH),
    "substep": Launch(Slurm, ("node1", "node2"), (0, 1)),
    # --gpus-per-node=2; --gpus-per-task=1; --gpu-bind=single:1; --gpus-per-task=2; --gres; 2 tasks on one GPU
    "gpus-per-node": Launch(Slurm, TWO, (0, 0, 1, 1), SEE_BOTH),
    "gpus-per-task": Launch(Slurm, TWO, (0, 0, 1, 1), SEE_ONE),
    "gpu-bind-single": Launch(Slurm, TWO, (0, 0, 1, 1), SEE_ONE),
    # --gpu-bind=mask_gpu:0x3,0xc,0x3,0xc of four GPUs
    "gpu-bind-mask": Launch(
        Slurm, ("node0",), (0, 0, 0, 0), ((("0", "1"), "0"), (("2", "3"), "2"), (("0", "1"), "1"), (("2", "3"), "3"))
    ),
    "gpus-per-task-two": Launch(Slurm, TWO, (0, 1), FIRST_OF_BOTH),
    "gres-one": Launch(Slurm, TWO, (0, 1), ((("0",), "0"),)),
    "gpu-shared": Launch(Slurm, ("node0",), (0, 0), ((("0",), "0"),) * 2),
    # srun --mpi=pmi2 and --mpi=pmix, which set variables of PMI and PMIx
    "pmi2": Launch(Slurm, TWO, (0, 0, 0, 1)),
    "pmix": Launch(Slurm, TWO, (0, 0, 0, 1)),
    # mpirun of Open MPI in sbatch: as it is, uneven, --map-by node, -n 4 on 3 nodes; in salloc
    "mpirun": Launch(Mpi, ALL, (0, 0, 1, 1, 2, 2), SEE_BOTH),
    "mpirun-uneven": Launch(Mpi, ALL, (0, 0, 0, 1, 2)),
    "mpirun-by-node": Launch(Mpi, ALL, (0, 1, 2, 0, 1, 2)),
    "mpirun-part": Launch(Mpi, None, (0, 0, 1, 1)),
    "salloc-mpirun": Launch(Mpi, TWO, (0, 0, 0, 1)),
    "salloc": Launch(Mpi, None, (0,)),
    # mpiexec of MPICH in sbatch: as it is, -n 4 on 3 nodes, -n 5, with --gpus-per-task=1
    "hydra": Launch(Mpi, ALL, (0, 0, 1, 1, 2, 2)),
    "hydra-part": Launch(Mpi, TWO, (0, 0, 1, 1)),
    "hydra-uneven": Launch(Mpi, ALL, (0, 0, 1, 1, 2)),
    "hydra-gpus": Launch(Mpi, TWO, (0, 0, 1, 1), SEE_BOTH),
    # srun -N1 -n2 : -N2 -n2; the groups node2 : node[0-1]; in sbatch: both groups -m cyclic, the second one, ...
    "het": Launch(Slurm, ALL, (0, 0, 1, 2)),
    "het-order": Launch(Slurm, ("node2", "node0", "node1"), (0, 0, 1, 2)),
    "het-cyclic": Launch(Slurm, ALL, (0, 0, 1, 2, 1, 2)),
    "het-second-group": Launch(Slurm, ("node1", "node2"), (0, 0, 1, 1)),
    "het-batch": Launch(Mpi, ("node0",), (0,)),
    "het-mpirun": Launch(Mpi, ("node0",), (0, 0)),
    "array-3": Launch(Mpi, ("node0",), (0,)),
    # sbatch called in a step of another job, whose SLURM_STEP_* it passes on
    "left-over-step": Launch(Mpi, ("node0",), (0,)),
}

# Launches and ranks whose environment does not tell the node of each rank.
UNKNOWN_LAYOUT = {("arbitrary", rank) for rank in range(5)} | {("mpirun-part", rank) for rank in range(4)}
# mpirun fills nodes one after the other by default. These two ranks cannot see the option --map-by node.
ASSUMED_LAYOUT = {("mpirun-by-node", 0), ("mpirun-by-node", 5)}
TASKS = [(folder, rank) for folder, launch in LAUNCHES.items() for rank in range(len(launch.node_of_rank))]


def test_every_folder_is_tested():
    assert {path.name for path in FOLDERS.iterdir()} == set(LAUNCHES)
    assert {(path.parent.name, int(path.stem)) for path in FOLDERS.glob("*/*.env")} == set(TASKS)


@pytest.mark.parametrize(("folder", "rank"), TASKS)
def test_placement(folder, rank):
    launch = LAUNCHES[folder]
    where = launch.node_of_rank
    resolver = resolve(recorded(folder, rank))
    placement = resolver.placement
    assert type(resolver) is launch.kind
    assert (placement.size, placement.rank) == (len(where), rank)
    assert placement.nodes == launch.nodes
    local_rank = where[:rank].count(where[rank])
    assert (placement.local_rank, placement.local_size) == (local_rank, where.count(where[rank]))
    if launch.nodes is not None:
        assert (placement.node, placement.host) == (where[rank], launch.nodes[where[rank]])
        assert placement.ranks_per_node == tuple(map(where.count, range(len(launch.nodes))))
    if (folder, rank) in UNKNOWN_LAYOUT:
        assert placement.node_of_rank is None
    elif (folder, rank) not in ASSUMED_LAYOUT:
        assert placement.node_of_rank == where
    if launch.gpus is None:
        assert (placement.gpus, placement.gpu, placement.device) == (None, None, None)
    else:
        seen, own = launch.gpus[local_rank]
        assert (placement.gpus, placement.gpu) == (seen, own)
        assert placement.device == f"cuda:{seen.index(own)}"


@pytest.mark.parametrize(("folder", "rank"), TASKS)
def test_facts_have_sources(folder, rank):
    environ = recorded(folder, rank)
    resolver = resolve(environ)
    assert resolver.reason
    for fact in resolver.placement.facts():
        assert fact.source, fact
    rank_source = resolver.placement.sources["rank"]
    if len(LAUNCHES[folder].node_of_rank) > 1:
        assert int(environ[rank_source]) == rank


@pytest.mark.parametrize(
    ("folder", "rank"),
    [task for task in TASKS if task not in UNKNOWN_LAYOUT | ASSUMED_LAYOUT and LAUNCHES[task[0]].nodes],
)
def test_addresses(folder, rank):
    launch = LAUNCHES[folder]
    expected = [
        f"{launch.nodes[node]}:{7000 + launch.node_of_rank[:index].count(node)}"
        for index, node in enumerate(launch.node_of_rank)
    ]
    resolver = resolve(recorded(folder, rank), port_base=7000)
    assert resolver.cluster_spec().as_dict() == {"worker": expected}
    assert (resolver.task_type, resolver.task_id) == ("worker", rank)
    assert resolver.master() == f"grpc://{expected[rank]}"


@pytest.mark.parametrize("task", sorted(UNKNOWN_LAYOUT))
def test_unknown_addresses(task):
    with pytest.raises(RuntimeError, match=r"MpiClusterResolver\(comm\) asks MPI"):
        resolve(recorded(*task)).cluster_spec()


def test_environments_are_not_changed():
    for task in TASKS:
        environ = recorded(*task)
        before = dict(environ)
        resolver = resolve(environ)
        if task not in UNKNOWN_LAYOUT and LAUNCHES[task[0]].nodes:
            resolver.cluster_spec()
        assert environ == before


def test_array_task_is_named_after_its_array():
    assert resolve(recorded("array-3", 0)).placement.job == "12_3"


@pytest.mark.parametrize(
    ("folder", "nodes"),
    [
        ("batch", ALL),
        ("mpirun-part", ALL),
        ("substep", ALL),
        ("het-order", ("node2", "node0", "node1")),
        ("het-batch", ("node0",)),  # mpirun starts no ranks on nodes of other groups
    ],
)
def test_allocation(folder, nodes):
    assert resolve(recorded(folder, 0)).placement.allocation == nodes
