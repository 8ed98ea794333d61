"""The own GPU of a rank that sees all, one or some GPUs of its node, found without changing the environment."""

import pytest

from mpistrat.cluster_resolver import SlurmClusterResolver, resolve
from mpistrat.cluster_resolver.gpus import with_gpus
from mpistrat.cluster_resolver.placement import Placement


def step(local_rank, local_size, **more):
    return {
        "SLURM_PROCID": str(local_rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_STEP_NUM_TASKS": str(local_size),
        "SLURM_STEP_NODELIST": "n0",
        "SLURM_STEP_TASKS_PER_NODE": str(local_size),
        **more,
    }


@pytest.mark.parametrize(
    ("seen", "given", "local_rank", "local_size", "gpu", "device", "number"),
    [
        ("0,1,2,3", "4", 2, 4, "2", "cuda:2", 1),  # --gpus-per-node=4
        ("0,1,2,3", "4", 1, 2, "2", "cuda:2", 2),  # two GPUs per rank
        ("3", "4", 3, 4, "3", "cuda:0", 1),  # --gpus-per-task=1, --gpu-bind=single:1
        ("2,3", "4", 1, 2, "2", "cuda:0", 2),  # --gpus-per-task=2
        ("2,3", "2", 1, 2, "3", "cuda:1", 1),  # a job with half of the node
        ("0", "1", 1, 2, "0", "cuda:0", 1),  # two ranks on one GPU
        ("0,1", "2", 3, 4, "1", "cuda:1", 1),  # four ranks on two GPUs
        ("GPU-8a,GPU-9b", "2", 1, 2, "GPU-9b", "cuda:1", 1),
        ("MIG-1a", "2", 1, 2, "MIG-1a", "cuda:0", 1),
        ("MIG-1a,MIG-2b", "2", 0, 2, "MIG-1a", "cuda:0", 1),
        ("MIG-1a,MIG-2b", "2", 1, 2, "MIG-2b", None, 1),  # CUDA shows only the first slice
        ("MIG-GPU-8a/1/0,MIG-GPU-8a/2/0", "2", 1, 2, "MIG-GPU-8a/2/0", None, 1),
        # --gpu-bind=closest: the ranks of a socket share its GPUs
        ("0,1", "4", 0, 4, "0", "cuda:0", 1),
        ("0,1", "4", 1, 4, "1", "cuda:1", 1),
        ("2,3", "4", 2, 4, "2", "cuda:0", 1),
        ("2,3", "4", 3, 4, "3", "cuda:1", 1),
        ("4,5,6,7", "8", 2, 4, "4", "cuda:0", 2),
        ("0,1", "8", 0, 3, "0", "cuda:0", 2),  # two GPUs for each of three ranks; two are idle
        ("GPU-8a,GPU-9b", "4", 1, 2, "GPU-8a", "cuda:0", 2),
        ("", "2", 0, 2, None, "cpu:0", 0),
        ("NoDevFiles", "0", 0, 2, None, "cpu:0", 0),
    ],
)
def test_own(seen, given, local_rank, local_size, gpu, device, number):
    environ = step(local_rank, local_size, CUDA_VISIBLE_DEVICES=seen, SLURM_GPUS_ON_NODE=given)
    environ["SLURM_DISTRIBUTION"] = "block:block"  # neighbours are on one socket
    before = dict(environ)
    resolver = resolve(environ)
    placement = resolver.placement
    assert (placement.gpu, placement.device, placement.gpus_per_rank) == (gpu, device, number)
    SlurmClusterResolver(auto_set_gpu=False, environ=environ).cluster_spec()
    assert environ == before


@pytest.mark.parametrize(
    ("seen", "more", "gpu", "number", "source"),
    [
        ("2,3", {"SLURM_GPUS_PER_TASK": "2"}, "2", 2, "SLURM_GPUS_PER_TASK"),
        ("2,3", {"SLURM_GPUS_PER_TASK": "a100:2"}, "2", 2, "SLURM_GPUS_PER_TASK"),
        ("0,1", {"SLURM_TRES_PER_TASK": "cpu=2,gres/gpu=2"}, "0", 2, "SLURM_TRES_PER_TASK"),
        ("0,1", {"SLURM_TRES_PER_TASK": "cpu:2,gres/gpu:a100:2"}, "0", 2, "SLURM_TRES_PER_TASK"),
        ("2,3", {"SLURMD_TRES_BIND": "gpu:per_task:2", "SLURM_STEP_GPUS": "2,3"}, "2", 2, "SLURMD_TRES_BIND"),
        ("3", {"SLURM_GPU_BIND": "single:1", "SLURM_STEP_GPUS": "3"}, "3", 1, "CUDA_VISIBLE_DEVICES"),
        # All tasks see all GPUs: --gpus-per-task=1 --gpu-bind=none
        ("0,1", {"SLURM_GPUS_PER_TASK": "1", "SLURM_GPU_BIND": "none"}, "1", 1, "the local rank"),
        ("0,1", {"SLURM_STEP_GPUS": "0,1"}, "1", 1, "the local rank"),
        ("0,1", {}, "1", 1, "the local rank"),
    ],
)
def test_without_the_number_of_the_node(seen, more, gpu, number, source):
    """Slurm before 20.11, and some plugins, do not set SLURM_GPUS_ON_NODE."""
    placement = resolve(step(1, 2, CUDA_VISIBLE_DEVICES=seen, **more)).placement
    assert (placement.gpu, placement.gpus_per_rank) == (gpu, number)
    assert placement.sources["gpu"].endswith(source)


def test_a_slice_of_its_own_is_the_first():
    """auto_set_gpu, as in tf.distribute, leaves only the rank's own slice visible: CUDA can use it."""
    environ = step(1, 2, CUDA_VISIBLE_DEVICES="MIG-1a,MIG-2b", SLURM_GPUS_ON_NODE="2")
    resolver = SlurmClusterResolver(environ=environ)
    assert resolver.placement.device is None
    resolver.cluster_spec()
    assert environ["CUDA_VISIBLE_DEVICES"] == "MIG-2b"
    assert (resolver.placement.gpu, resolver.placement.device) == ("MIG-2b", "cuda:0")


def test_the_source_says_why_a_slice_has_no_device():
    rank_1 = Placement("srun", 2, 1, local_rank=1, local_size=2)
    own = with_gpus(rank_1, {"CUDA_VISIBLE_DEVICES": "MIG-1a,MIG-2b"}, None)
    assert own.device is None
    assert "one MIG slice" in own.sources["device"]
