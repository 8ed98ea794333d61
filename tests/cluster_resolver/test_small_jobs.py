"""Batch scripts that are a job's only task, GPUs that only an argument promises, and a job without a name."""

from unittest.mock import MagicMock

import pytest
from recorded import recorded

from mpistrat.cluster_resolver import GCEClusterResolver, SlurmClusterResolver

SCRIPT = {
    "SLURM_JOB_ID": "20",
    "SLURM_JOB_NODELIST": "node7",
    "SLURM_TASKS_PER_NODE": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0",
    "SLURMD_NODENAME": "node7",
}


class TestBatchScript:
    @pytest.mark.parametrize("counted", [{}, {"SLURM_NTASKS": "1", "SLURM_NPROCS": "1"}])
    def test_is_one_task(self, counted):
        resolver = SlurmClusterResolver(environ={**SCRIPT, **counted, "CUDA_VISIBLE_DEVICES": ""})
        assert resolver.cluster_spec().as_dict() == {"worker": ["node7:8888"]}
        assert (resolver.get_task_info(), resolver.master()) == (("worker", 0), "grpc://node7:8888")
        placement = resolver.placement
        assert (placement.launcher, placement.size, placement.rank) == ("sbatch", 1, 0)
        assert (placement.nodes, placement.local_rank, placement.job) == (("node7",), 0, "20")
        assert placement.sources["size"] == "SLURM_TASKS_PER_NODE"
        assert placement.sources["nodes"] == "SLURM_JOB_NODELIST"

    def test_as_slurm_wrote_it(self):
        resolver = SlurmClusterResolver(environ=recorded("array-3", 0))
        assert (resolver.placement.size, resolver.placement.nodes) == (1, ("node0",))

    def test_of_a_job_of_its_own(self):
        assert SlurmClusterResolver({"chief": 1}, environ=dict(SCRIPT)).get_task_info() == ("chief", 0)
        with pytest.raises(RuntimeError, match="need 2 tasks, but the step has 1"):
            SlurmClusterResolver({"worker": 2}, environ=dict(SCRIPT))

    def test_gpu_is_its_own(self):
        environ = {**SCRIPT, "CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "2"}
        resolver = SlurmClusterResolver(environ=environ)
        resolver.cluster_spec()
        assert resolver.num_accelerators() == {"GPU": 2}
        assert environ["CUDA_VISIBLE_DEVICES"] == "0,1"

    @pytest.mark.parametrize("counts", ["2", "1(x2)", "2(x3)"])
    def test_of_a_job_with_several_tasks_is_refused(self, counts):
        with pytest.raises(RuntimeError, match=r"SLURM_STEP_NUM_TASKS is not set: srun sets it"):
            SlurmClusterResolver(environ={**SCRIPT, "SLURM_TASKS_PER_NODE": counts})

    def test_as_slurm_wrote_it_for_several_tasks_is_refused(self):
        with pytest.raises(RuntimeError, match=r"SLURM_STEP_NUM_TASKS is not set: srun sets it"):
            SlurmClusterResolver(environ=recorded("batch", 0))


class TestGpusThatAreHidden:
    """As tf.distribute does, a task is given the GPUs that ``gpus_per_node`` promises, also if none is visible."""

    STEP = {
        "SLURM_STEP_NODELIST": "tux07",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_PROCID": "1",
    }

    @pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles", None])
    @pytest.mark.parametrize(("there", "own"), [(2, "1"), (4, "2,3")])
    def test_are_numbered(self, hidden, there, own):
        environ = dict(self.STEP)
        if hidden is not None:
            environ["CUDA_VISIBLE_DEVICES"] = hidden
        resolver = SlurmClusterResolver(gpus_per_node=there, environ=environ)
        assert resolver.num_accelerators() == {"GPU": there // 2}
        for _ in range(2):
            resolver.cluster_spec()
            assert environ["CUDA_VISIBLE_DEVICES"] == own

    @pytest.mark.parametrize("options", [{}, {"gpus_per_node": 0}, {"gpus_per_node": 2, "auto_set_gpu": False}])
    def test_stay_hidden(self, options):
        environ = {**self.STEP, "CUDA_VISIBLE_DEVICES": ""}
        SlurmClusterResolver(environ=environ, **options).cluster_spec()
        assert environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(("name", "job"), [("", ""), ("worker", "worker"), ("ps", "ps")])
def test_group_of_machines_with_any_name_of_a_job(name, job):
    service = MagicMock()
    groups = service.instanceGroups()
    groups.listInstances().execute.return_value = {"items": [{"instance": "zones/z/instances/w"}]}
    groups.listInstances_next.return_value = None
    machine = {"networkInterfaces": [{"networkIP": "10.0.0.3"}]}
    service.instances().get().execute.return_value = machine
    resolver = GCEClusterResolver("p", "z", "g", 7000, task_type=name, service=service)
    assert resolver.cluster_spec().as_dict() == {job: ["10.0.0.3:7000"]}
    assert resolver.task_type == job
    assert resolver.master() == resolver.master(job, 0) == "grpc://10.0.0.3:7000"
    with pytest.raises(ValueError, match="'other'"):
        resolver.master("other", 0)
