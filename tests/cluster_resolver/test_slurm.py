"""The resolver for steps of Slurm: jobs, ports, GPUs, and variables that are missing or wrong."""

import os

import pytest
from recorded import recorded

from mpistrat.cluster_resolver import SlurmClusterResolver, resolve

STEP = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "tux[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
GPUS = {**STEP, "CUDA_VISIBLE_DEVICES": "0,1"}


@pytest.fixture
def nvidia_smi(tmp_path):
    """``nvidia_smi(text, status)``: return a PATH with an nvidia-smi that prints ``text`` and ends with ``status``."""

    def make(text, status=0):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho '{text}'\nexit {status}\n")
        program.chmod(0o755)
        return str(tmp_path)

    return make


def own(environ, *arguments, **keywords):
    return SlurmClusterResolver(*arguments, environ=dict(environ), **keywords)


class TestJobs:
    def test_take_ranks_in_the_order_of_their_names(self):
        resolver = own(STEP, {"worker": 3, "ps": 1}, 5000)
        assert (resolver.task_type, resolver.task_id) == resolver.get_task_info() == ("worker", 2)
        assert resolver.cluster_spec().as_dict() == {
            "ps": ["tux07:5000"],
            "worker": ["tux07:5001", "tux08:5000", "tux08:5001"],
        }
        assert resolver.master() == "grpc://tux08:5001"
        assert resolver.master("ps", 0, "mpi") == "mpi://tux07:5000"
        resolver.rpc_layer = None
        assert resolver.master("ps", 0) == "tux07:5000"

    def test_environment_is_that_of_this_process(self, monkeypatch):
        for name, value in GPUS.items():
            monkeypatch.setenv(name, value)
        resolver = SlurmClusterResolver()
        assert resolver.get_task_info() == ("worker", 3)
        resolver.cluster_spec()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"

    def test_nodes_are_in_the_order_of_slurm(self):
        environ = {**STEP, "SLURM_STEP_NODELIST": "n10,n2", "SLURM_STEP_TASKS_PER_NODE": "1,3"}
        assert own(environ).cluster_spec().as_dict()["worker"][:2] == ["n10:8888", "n2:8888"]

    @pytest.mark.parametrize("jobs", [{"worker": 3}, {"worker": 5}, {"ps": 1, "worker": 2}])
    def test_must_add_up(self, jobs):
        with pytest.raises(RuntimeError, match=f"need {sum(jobs.values())} tasks, but the step has 4"):
            own(STEP, jobs)

    def test_need_no_number_of_tasks(self):
        environ = {name: value for name, value in STEP.items() if name != "SLURM_STEP_NUM_TASKS"}
        assert own(environ, {"worker": 4}).task_id == 3

    def test_are_a_dict(self):
        with pytest.raises(TypeError, match="jobs is a dict"):
            own(STEP, ["worker"])

    def test_negative(self):
        with pytest.raises(ValueError, match="0 tasks or more"):
            own(STEP, {"worker": 5, "ps": -1})

    def test_unknown_task(self):
        with pytest.raises(ValueError, match="has no task 9"):
            own(STEP).master("worker", 9)


class TestTasksPerNode:
    def test_number(self):
        environ = {name: value for name, value in STEP.items() if "TASKS_PER" not in name}
        assert own(environ, tasks_per_node=2).cluster_spec().num_tasks("worker") == 4
        with pytest.raises(RuntimeError, match="SLURM_STEP_NUM_TASKS=4, but tasks_per_node adds up to 6"):
            own(environ, tasks_per_node=3)

    def test_by_name(self):
        environ = {"SLURM_PROCID": "1"}
        resolver = own(environ, {"worker": 3}, tasks_per_node={"n2": 1, "n10": 2})
        assert resolver.cluster_spec().as_dict() == {"worker": ["n2:8888", "n10:8888", "n10:8889"]}
        placement = resolver.placement
        assert (placement.node, placement.host, placement.local_rank) == (1, "n10", 0)
        assert placement.sources["nodes"] == "tasks_per_node"

    def test_wrong_kind(self):
        with pytest.raises(TypeError, match="tasks_per_node is a number"):
            own(STEP, tasks_per_node=[2, 2])


@pytest.mark.parametrize("port_base", [-1, 0, 65535, 70000, 8888.0, "8888", None])
def test_ports_that_do_not_exist(port_base):
    with pytest.raises(ValueError, match="port_base is a number from 1 to 65534, as a node has 2 ranks"):
        own(STEP, port_base=port_base).cluster_spec()
    assert own(STEP, port_base=65534).master() == "grpc://tux08:65535"


@pytest.mark.parametrize("name", ["gpus_per_node", "gpus_per_task"])
def test_numbers_of_gpus_that_are_none(name):
    with pytest.raises(ValueError, match=f"{name} is a number of GPUs from 0 on, not -1"):
        own(STEP, **{name: -1})
    with pytest.raises(TypeError, match=f"{name} is a number of GPUs, not '2'"):
        own(STEP, **{name: "2"})


class TestVariables:
    @pytest.mark.parametrize("missing", STEP)
    @pytest.mark.parametrize("left", [None, ""])
    def test_missing(self, missing, left):
        environ = {name: left if name == missing else value for name, value in STEP.items()}
        with pytest.raises(RuntimeError, match=f"{missing} is (not set|empty): srun sets it"):
            own({name: value for name, value in environ.items() if value is not None})

    @pytest.mark.parametrize(
        ("name", "value", "text"),
        [
            ("SLURM_PROCID", "x", "SLURM_PROCID must be a number"),
            ("SLURM_PROCID", "\u0967", "SLURM_PROCID must be a number"),
            ("SLURM_PROCID", "9" * 5000, "SLURM_PROCID must be a number"),
            ("SLURM_STEP_NUM_TASKS", "-1", "SLURM_STEP_NUM_TASKS must be a number"),
            ("SLURM_STEP_NODELIST", "tux[07-08", "SLURM_STEP_NODELIST cannot be read.*at position 3"),
            ("SLURM_STEP_TASKS_PER_NODE", "2(x2", "SLURM_STEP_TASKS_PER_NODE cannot be read.*at position 1"),
        ],
    )
    def test_unreadable(self, name, value, text):
        with pytest.raises(ValueError, match=text):
            own({**STEP, name: value})

    def test_of_more_groups_than_there_can_be(self):
        assert own({**STEP, "SLURM_HET_SIZE": "9" * 18}).task_id == 3

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"SLURM_STEP_NODELIST": "a,b,c"}, "names 3 nodes, but SLURM_STEP_TASKS_PER_NODE=.*2 counts"),
            ({"SLURM_STEP_NUM_TASKS": "5"}, "SLURM_STEP_NUM_TASKS=5, but SLURM_STEP_TASKS_PER_NODE adds up to 4"),
            ({"SLURM_PROCID": "4"}, "SLURM_PROCID=4, but the step has 4 tasks"),
        ],
    )
    def test_contradictory(self, changes, text):
        with pytest.raises(RuntimeError, match=text):
            own({**STEP, **changes})

    def test_step_of_another_job(self):
        with pytest.raises(RuntimeError, match=r"those of another job.*SLURM_STEP_NODELIST=node.0-1. is not part of"):
            own(recorded("left-over-step", 0))
        same_nodes = {**recorded("left-over-step", 0), "SLURM_JOB_NODELIST": "node[0-2]"}
        with pytest.raises(RuntimeError, match="SLURM_STEP_NUM_TASKS=2 but SLURM_NTASKS=1"):
            own(same_nodes)

    @pytest.mark.parametrize("more", [{}, {"PMIX_NAMESPACE": "slurm.pmix.{job}.0"}])
    @pytest.mark.parametrize("rank", range(4))
    def test_step_that_keeps_the_counts_of_its_job(self, rank, more):
        """``srun --preserve-env -n 4`` in a job of eight tasks."""
        environ = recorded("gpus-per-node", rank)
        for name, text in more.items():
            environ |= {name: text.format(job=environ["SLURM_JOB_ID"]), "PMIX_RANK": str(rank)}
        placement = resolve({**environ, "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)"}).placement
        assert (placement.launcher, placement.size, placement.rank) == ("srun", 4, rank)

    def test_shell_in_a_job(self):
        """The only task of its step, with the counts of the job."""
        environ = {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
        environ |= {"SLURM_STEP_NODELIST": "tux07", "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)"}
        placement = resolve(environ).placement
        assert (placement.launcher, placement.size, placement.nodes) == ("srun", 1, ("tux07",))


class TestDistributions:
    def test_of_a_file(self):
        """The file has the order of the tasks, and is the user's own."""
        resolver = own({**recorded("arbitrary", 1), "SLURM_HOSTFILE": "hosts"})
        assert (resolver.placement.rank, resolver.placement.local_rank) == (1, 0)
        assert resolver.placement.node_of_rank is None
        with pytest.raises(RuntimeError, match=r"SLURM_DISTRIBUTION=arbitrary leaves the order.*MpiClusterResolver"):
            resolver.cluster_spec()

    def test_that_is_not_what_slurm_did(self):
        """SLURM_GTIDS, the list of this node's tasks, is trusted more than SLURM_DISTRIBUTION."""
        resolver = own({**recorded("cyclic", 3), "SLURM_DISTRIBUTION": "block"})
        assert (resolver.placement.node, resolver.placement.local_rank) == (0, 1)
        with pytest.raises(RuntimeError, match="would put tasks 0,1 on node0, but SLURM_GTIDS=0,3"):
            resolver.cluster_spec()
        assert own(recorded("cyclic", 3), tasks_per_node=2).cluster_spec()

    @pytest.mark.parametrize("text", ["block", "block:cyclic", "block,nopack", "pack", "unknown", ""])
    def test_like_block(self, text):
        assert own({**recorded("even", 3), "SLURM_DISTRIBUTION": text}).placement.node_of_rank == (0, 0, 1, 1, 2, 2)

    @pytest.mark.parametrize("text", ["cyclic:block", "cyclic,pack"])
    def test_like_cyclic(self, text):
        placement = own({**recorded("cyclic", 4), "SLURM_DISTRIBUTION": text}).placement
        assert placement.node_of_rank == (0, 1, 2, 0, 1, 2)


HET = {
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID": "27",
    "SLURM_JOB_ID_HET_GROUP_0": "27",
    "SLURM_JOB_ID_HET_GROUP_1": "28",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n0",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n[1-2]",
}


class TestComponents:
    """A step of one component: the job's variables describe the batch script's component."""

    STEP = {
        **HET,
        "SLURM_JOB_NODELIST": "n0",
        "SLURM_NTASKS": "1",
        "SLURM_TASKS_PER_NODE": "1",
        "SLURM_PROCID": "2",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_NODEID": "1",
        "SLURM_LOCALID": "0",
    }

    @pytest.mark.parametrize("job", ["27", "28"])
    def test_is_not_left_over(self, job):
        placement = resolve({**self.STEP, "SLURM_JOB_ID": job}).placement
        assert (placement.launcher, placement.size, placement.rank) == ("srun", 4, 2)
        assert (placement.nodes, placement.node_of_rank) == (("n1", "n2"), (0, 0, 1, 1))
        assert placement.allocation == ("n0", "n1", "n2")

    def test_one_component_alone(self):
        """``srun --het-group=0`` in a job whose other components have other counts."""
        environ = {
            **{name: text for name, text in self.STEP.items() if "HET" not in name},
            **{name: text for name, text in HET.items() if not name.endswith("_1")},
            "SLURM_HET_SIZE": "1",
            "SLURM_STEP_NODELIST": "n0",
            "SLURM_STEP_TASKS_PER_NODE": "4",
            "SLURM_NODEID": "0",
            "SLURM_LOCALID": "2",
        }
        placement = resolve(environ).placement
        assert (placement.launcher, placement.size, placement.local_rank) == ("srun", 4, 2)

    def test_left_over_from_a_heterogeneous_job(self):
        """The batch script belongs to a job that was submitted inside such a step."""
        environ = {**self.STEP, "SLURM_JOB_ID": "30"}
        resolver = resolve(environ)
        assert (resolver.placement.size, resolver.placement.allocation) == (1, ("n0",))
        with pytest.raises(RuntimeError, match="those of another job"):
            own(environ)


class TestComponentsOnOneNode:
    """Slurm lists a shared node once per component, and numbers the tasks of each component from 0."""

    STEP = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_JOB_ID": "9"}
    TASKS = (("0,1", "0", "0"), ("0,1", "1", "0"), ("2", "0", "1"))

    @pytest.mark.parametrize("nodes", ["n[0,0]", "n0,n0"])
    @pytest.mark.parametrize("rank", range(3))
    @pytest.mark.parametrize("named", [True, False])
    def test_are_one_node(self, nodes, rank, named):
        gtids, local, number = self.TASKS[rank]
        environ = {**self.STEP, "SLURM_STEP_NODELIST": nodes, "SLURM_PROCID": str(rank)}
        environ |= {"SLURM_GTIDS": gtids, "SLURM_LOCALID": local, "SLURM_NODEID": number}
        resolver = resolve({**environ, **({"SLURMD_NODENAME": "n0"} if named else {})})
        placement = resolver.placement
        assert (placement.nodes, placement.ranks_per_node, placement.node_of_rank) == (("n0",), (3,), (0,) * 3)
        assert (placement.node, placement.host) == (0, "n0")
        assert (placement.local_rank, placement.local_size) == (rank, 3)
        assert placement.sources["local_rank"] != "SLURM_LOCALID"
        assert resolver.cluster_spec().as_dict() == {"worker": ["n0:8888", "n0:8889", "n0:8890"]}

    def test_in_any_order_of_counts(self):
        """With one node, the place of a task is known for every order of counts."""
        environ = {**self.STEP, "SLURM_STEP_NODELIST": "n0,n0", "SLURM_PROCID": "1", "SLURM_GTIDS": "1,2"}
        placement = resolve({**environ, "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}).placement
        assert (placement.local_rank, placement.local_size, placement.node_of_rank) == (1, 3, (0, 0, 0))

    @pytest.mark.parametrize(
        ("rank", "gtids", "node", "local"),
        [(0, "0,1", 0, 0), (1, "0,1", 0, 1), (2, "2", 1, 0), (3, "3", 0, 2), (4, "4", 2, 0)],
    )
    def test_of_a_heterogeneous_job(self, rank, gtids, node, local):
        """The first component has two tasks on n1, the second one on each of n0, n1 and n2."""
        environ = {
            "SLURM_HET_SIZE": "2",
            "SLURM_JOB_ID": "27",
            "SLURM_JOB_ID_HET_GROUP_0": "27",
            "SLURM_JOB_NODELIST_HET_GROUP_0": "n1",
            "SLURM_JOB_NODELIST_HET_GROUP_1": "n[0-2]",
            "SLURM_PROCID": str(rank),
            "SLURM_STEP_NUM_TASKS": "5",
            "SLURM_STEP_NODELIST": "n0,n1,n1,n2",
            "SLURM_STEP_TASKS_PER_NODE": "1,2,1(x2)",
            "SLURM_GTIDS": gtids,
            "SLURM_LOCALID": "1" if rank == 1 else "0",
            "SLURMD_NODENAME": ["n1", "n0", "n2"][node],
        }
        placement = resolve(environ).placement
        assert (placement.nodes, placement.ranks_per_node) == (("n1", "n0", "n2"), (3, 1, 1))
        assert (placement.node, placement.local_rank, placement.node_of_rank) == (node, local, (0, 0, 1, 0, 2))
        assert placement.allocation == ("n1", "n0", "n2")

    def test_in_a_list_that_is_merged_already(self):
        """The node has more tasks than this component, so SLURM_LOCALID is not the task's place on the node."""
        environ = {**self.STEP, "SLURM_STEP_NODELIST": "n[0-1]", "SLURM_PROCID": "1", "SLURM_GTIDS": "1"}
        placement = resolve({**environ, "SLURM_LOCALID": "0", "SLURMD_NODENAME": "n0"}).placement
        assert (placement.node, placement.local_rank, placement.local_size) == (0, None, 2)


class TestGpus:
    def test_of_the_task_are_set(self):
        environ = {**GPUS, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
        resolver = SlurmClusterResolver(environ=environ)
        assert environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
        for _ in range(2):
            resolver.cluster_spec()
            assert environ["CUDA_VISIBLE_DEVICES"] == "2,3"
            assert (resolver.placement.gpu, resolver.placement.device) == ("2", "cuda:0")
        SlurmClusterResolver(gpus_per_node=4, gpus_per_task=2, environ=environ).cluster_spec()
        assert environ["CUDA_VISIBLE_DEVICES"] == "2,3"

    def test_are_those_that_the_process_was_given(self):
        environ = {**GPUS, "CUDA_VISIBLE_DEVICES": "5,MIG-6f4b"}
        SlurmClusterResolver(environ=environ).cluster_spec()
        assert environ["CUDA_VISIBLE_DEVICES"] == "MIG-6f4b"

    def test_are_numbered_if_nothing_is_set(self):
        environ = dict(STEP)
        SlurmClusterResolver(gpus_per_node=4, environ=environ).cluster_spec()
        assert environ["CUDA_VISIBLE_DEVICES"] == "2,3"

    def test_are_left_alone(self):
        environ = dict(GPUS)
        SlurmClusterResolver(auto_set_gpu=False, environ=environ).cluster_spec()
        assert environ == GPUS

    @pytest.mark.parametrize("folder", ["gpus-per-task", "gpu-bind-single"])
    def test_that_slurm_dealt_out_are_left_alone(self, folder):
        for rank in range(4):
            environ = recorded(folder, rank)
            resolver = SlurmClusterResolver(environ=environ)
            assert resolver.num_accelerators() == {"GPU": 1}
            resolver.cluster_spec()
            assert environ == recorded(folder, rank)

    def test_that_all_tasks_see_are_divided(self):
        for rank in range(4):
            environ = recorded("gpus-per-node", rank)
            SlurmClusterResolver(environ=environ).cluster_spec()
            assert environ["CUDA_VISIBLE_DEVICES"] == str(rank % 2)

    @pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
    def test_of_a_job_without(self, hidden):
        environ = {**STEP, "CUDA_VISIBLE_DEVICES": hidden}
        resolver = SlurmClusterResolver(environ=environ)
        assert resolver.num_accelerators() == {"GPU": 0}
        assert resolver.cluster_spec().num_tasks("worker") == 4
        assert environ["CUDA_VISIBLE_DEVICES"] == hidden
        assert (resolver.placement.gpus, resolver.placement.device) == ((), "cpu:0")

    @pytest.mark.parametrize(
        ("more", "sockets"),
        [
            ({}, [0, 1, 0, 1]),
            ({"SLURM_DISTRIBUTION": "block:cyclic"}, [0, 1, 0, 1]),
            ({"SLURM_DISTRIBUTION": "cyclic:block,NoPack"}, [0, 0, 1, 1]),
            ({"SLURM_GPU_BIND": "mask:0x3,0x3,0xc,0xc"}, [0, 0, 1, 1]),
            ({"SLURMD_TRES_BIND": "gpu:mask_gpu:0x3*2,0xc*2"}, [0, 0, 1, 1]),
            ({"SLURMD_TRES_BIND": "gpu:verbose,mask_gpu:0x3,0xC"}, [0, 1, 0, 1]),
            ({"SLURMD_TRES_BIND": "gpu:mask_gpu:0x3,0xc,0xc,0x3"}, [0, 1, 1, 0]),
        ],
    )
    def test_of_sockets_are_divided_among_their_tasks(self, more, sockets):
        step = {**STEP, "SLURM_STEP_NODELIST": "n0", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_GPUS_ON_NODE": "4"}
        found = []
        for rank, socket in enumerate(sockets):
            environ = {**step, **more, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
            environ["CUDA_VISIBLE_DEVICES"] = ["0,1", "2,3"][socket]
            resolver = SlurmClusterResolver(environ=environ)
            assert resolver.num_accelerators() == {"GPU": 1}
            found.append((resolver.placement.gpu, resolver.placement.device))
            for _ in range(2):
                resolver.cluster_spec()
                assert environ["CUDA_VISIBLE_DEVICES"] == found[-1][0]
            placement = SlurmClusterResolver(environ=environ).placement
            assert (placement.gpu, placement.device) == (found[-1][0], "cuda:0")
        assert sorted(found) == [("0", "cuda:0"), ("1", "cuda:1"), ("2", "cuda:0"), ("3", "cuda:1")]

    def test_of_sockets_are_divided_unevenly(self):
        """Three tasks share two masks of four GPUs each."""
        step = {**STEP, "SLURM_STEP_NODELIST": "n0", "SLURM_STEP_TASKS_PER_NODE": "3"}
        step |= {"SLURM_STEP_NUM_TASKS": "3", "SLURM_GPUS_ON_NODE": "8"}
        for given, expected in ((None, ["4,5", "0,1,2,3", "6,7"]), (1, ["4", "0", "5"])):
            for rank in range(3):
                environ = {**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
                environ["SLURMD_TRES_BIND"] = "gpu:mask_gpu:0xf0,0x0f"
                environ["CUDA_VISIBLE_DEVICES"] = ["4,5,6,7", "0,1,2,3"][rank % 2]
                SlurmClusterResolver(gpus_per_task=given, environ=environ).cluster_spec()
                assert environ["CUDA_VISIBLE_DEVICES"] == expected[rank]

    def test_of_sockets_are_too_few(self):
        environ = {**STEP, "SLURM_STEP_NODELIST": "n0", "SLURM_STEP_TASKS_PER_NODE": "4"}
        environ |= {"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "2,3", "SLURM_LOCALID": "3"}
        environ["SLURMD_TRES_BIND"] = "gpu:mask_gpu:0xf,0xc"
        SlurmClusterResolver(environ=environ).cluster_spec()
        assert environ["CUDA_VISIBLE_DEVICES"] == "3"
        environ |= {"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "2,3,4", "SLURMD_TRES_BIND": "gpu:mask_gpu:0x1c"}
        with pytest.raises(RuntimeError, match="GPUs 6 to 7 of the node are for task 3, but CUDA_VISIBLE"):
            SlurmClusterResolver(gpus_per_task=2, environ=environ).cluster_spec()

    def test_number_of_the_node_keeps_its_source(self):
        environ = {**GPUS, "CUDA_VISIBLE_DEVICES": "1", "SLURM_GPUS_ON_NODE": "2"}
        resolver = SlurmClusterResolver(environ=environ)
        before = resolver.placement
        resolver.num_accelerators()
        resolver.cluster_spec()
        assert resolver.placement.sources == before.sources

    def test_of_another_maker(self):
        placement = own({**STEP, "SLURM_LOCALID": "1", "ROCR_VISIBLE_DEVICES": "4,5"}).placement
        assert (placement.gpu, placement.device, placement.sources["gpus"]) == ("5", "cuda:1", "ROCR_VISIBLE_DEVICES")

    def test_fewer_than_tasks(self):
        environ = {**STEP, "CUDA_VISIBLE_DEVICES": "7"}
        resolver = SlurmClusterResolver(environ=environ)
        assert resolver.num_accelerators() == {"GPU": 0}
        assert (resolver.placement.gpu, resolver.placement.device) == ("7", "cuda:0")

    @pytest.mark.parametrize("given", [{}, {"gpus_per_node": 2}])
    def test_too_few(self, given):
        with pytest.raises(RuntimeError, match="gpus_per_task=2 needs 4 GPUs on a node with 2 tasks, but it has 2"):
            own(GPUS, gpus_per_task=2, **given)

    def test_of_node_and_of_variable_disagree(self):
        environ = {**GPUS, "CUDA_VISIBLE_DEVICES": "0,1,2"}
        with pytest.raises(RuntimeError, match="GPUs 2 to 3 of the node are for task 3, but CUDA_VISIBLE_DEVICES"):
            own(environ, gpus_per_node=4).cluster_spec()

    def test_are_counted(self, nvidia_smi):
        environ = {**STEP, "PATH": nvidia_smi("GPU 0: x\nGPU 1: y\n  MIG 1g\nGPU 2: x\nGPU 3: x")}
        assert own(environ).num_accelerators() == {"GPU": 2}

    def test_no_program_to_count_them(self, tmp_path):
        assert own({**STEP, "PATH": str(tmp_path)}).num_accelerators() == {"GPU": 0}

    def test_program_to_count_them_fails(self, nvidia_smi):
        resolver = own({**STEP, "PATH": nvidia_smi("no driver", 9)})
        with pytest.raises(RuntimeError, match="ended with status 9: no driver"):
            resolver.num_accelerators()
