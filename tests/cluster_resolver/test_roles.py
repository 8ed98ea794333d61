"""Jobs of several kinds: which rank has which task, and where the jobs are read from."""

import json

import pytest

import mpistrat
from mpistrat.cluster_resolver import (
    FluxClusterResolver,
    MpiClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    resolve,
)
from mpistrat.cluster_resolver.roles import Roles, dealt
from mpistrat.runtime.environment import OptionError

JOBS = {"chief": 1, "worker": 3, "ps": 2}
ALL = "chief=1,worker=3,ps=2"


def mpirun(rank, **more):
    """Six ranks of Open MPI on two nodes."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "6",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % 3),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
        "PMIX_HOSTNAME": f"n{rank // 3 + 1}",
        "SLURM_JOB_NODELIST": "n[1-2]",
        **more,
    }


def srun(rank, **more):
    """Six tasks of Slurm on two nodes."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": "6",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "3(x2)",
        "CUDA_VISIBLE_DEVICES": "",
        **more,
    }


def tf_config(cluster, **task):
    return json.dumps({"cluster": {job: [f"h{i}:1" for i in range(n)] for job, n in cluster.items()}, **task})


def tasks_of(make, environment, **arguments):
    return [
        (each.task_type, each.task_id) for each in (make(environ=environment(rank), **arguments) for rank in range(6))
    ]


IN_ORDER = [("chief", 0), *(("worker", i) for i in range(3)), ("ps", 0), ("ps", 1)]
SORTED = [("chief", 0), ("ps", 0), ("ps", 1), *(("worker", i) for i in range(3))]
SPREAD = [("chief", 0), ("worker", 0), ("ps", 0), ("worker", 1), ("worker", 2), ("ps", 1)]


class TestDealing:
    def test_in_the_order_written(self):
        assert tasks_of(MpiClusterResolver, mpirun, jobs=JOBS) == IN_ORDER
        backwards = dict(reversed(JOBS.items()))
        assert tasks_of(MpiClusterResolver, mpirun, jobs=backwards)[:2] == [("ps", 0), ("ps", 1)]

    def test_in_the_order_of_slurm(self):
        assert tasks_of(SlurmClusterResolver, srun, jobs=JOBS) == SORTED

    @pytest.mark.parametrize("make", [MpiClusterResolver, SlurmClusterResolver])
    def test_spread_over_nodes(self, make):
        environment = mpirun if make is MpiClusterResolver else srun
        assert tasks_of(make, environment, jobs=JOBS, spread="ps") == SPREAD

    def test_answers_agree_with_each_other(self):
        for rank, (job, number) in enumerate(SPREAD):
            resolver = MpiClusterResolver(jobs=JOBS, spread="ps", environ=mpirun(rank))
            spec = resolver.cluster_spec()
            assert spec.jobs == list(JOBS)
            assert resolver.tasks() == {each: tuple(range(n)) for each, n in JOBS.items()}
            assert resolver.roles.rank_of(job, number) == rank
            assert resolver.roles.task_of(rank) == (job, number)
            assert resolver.master() == "grpc://" + spec.task_address(job, number)
            assert spec.task_address(job, number) == f"n{rank // 3 + 1}:{8888 + rank % 3}"
            assert resolver.num_accelerators() == {}
            assert resolver.placement.rank == rank

    def test_roles(self):
        roles = MpiClusterResolver(jobs=JOBS, spread="ps", environ=mpirun(0)).roles
        assert (roles.chief, roles.workers, roles.parameter_servers, roles.size) == (0, (1, 3, 4), (2, 5), 6)
        assert roles == Roles({"chief": (0,), "worker": (1, 3, 4), "ps": (2, 5)})
        everyone = MpiClusterResolver(environ=mpirun(4)).roles
        assert (everyone.chief, everyone.parameter_servers, everyone.task_of(4)) == (None, (), ("worker", 4))
        for wrong in (lambda: roles.task_of(6), lambda: roles.rank_of("ps", 2), lambda: roles.rank_of("cook", 0)):
            with pytest.raises(ValueError, match=r"task.*ps on ranks \[2, 5\]"):
                wrong()

    def test_jobs_without_tasks(self):
        assert dealt({"chief": 0, "worker": 2}, 2) == Roles({"chief": (), "worker": (0, 1)})
        assert dealt({"chief": 0, "worker": 2}, 2).chief is None


class TestArguments:
    @pytest.mark.parametrize("jobs", [["worker"], {"worker": "6"}, {"worker": 6.0}, {0: 6}, "worker=6"])
    def test_jobs_of_another_type(self, jobs):
        with pytest.raises(TypeError, match="jobs is a dict"):
            MpiClusterResolver(jobs=jobs, environ=mpirun(1))

    def test_negative(self):
        with pytest.raises(ValueError, match="0 tasks or more"):
            MpiClusterResolver(jobs={"worker": 7, "ps": -1}, environ=mpirun(1))

    @pytest.mark.parametrize("jobs", [{}, {"worker": 5}, {"chief": 1, "ps": 6}])
    def test_another_number_of_ranks(self, jobs):
        with pytest.raises(RuntimeError, match=f"names {sum(jobs.values())} tasks, .*but the program has 6 ranks"):
            MpiClusterResolver(jobs=jobs, environ=mpirun(1))

    @pytest.mark.parametrize(
        ("spread", "jobs", "error", "text"),
        [
            ("ps", {"worker": 3, "ps": 3}, ValueError, "has 3 tasks, and the ranks are on 2 nodes"),
            ("ps", {"worker": 6}, ValueError, "'ps' is not one of the jobs"),
            (2, JOBS, TypeError, "spread is the name of a job, not 2"),
        ],
    )
    def test_spread(self, spread, jobs, error, text):
        for make, environ in ((MpiClusterResolver, mpirun(5)), (SlurmClusterResolver, srun(5))):
            with pytest.raises(error, match=text):
                make(jobs=jobs, spread=spread, environ=environ)

    def test_spread_over_nodes_that_are_not_known(self):
        environ = {name: value for name, value in mpirun(1).items() if name != "SLURM_JOB_NODELIST"}
        with pytest.raises(RuntimeError, match=r"needs the node of each rank.*MpiClusterResolver\(comm\)"):
            MpiClusterResolver(jobs=JOBS, spread="ps", environ=environ)
        assert MpiClusterResolver(jobs=JOBS, environ=environ).roles.parameter_servers == (4, 5)


class TestEnvironment:
    def test_every_launcher_reads_it(self):
        told = {"MPISTRAT_ROLES": "chief=1, worker=3, ps=2"}
        assert tasks_of(MpiClusterResolver, lambda rank: mpirun(rank, **told)) == IN_ORDER
        assert tasks_of(resolve, lambda rank: mpirun(rank, **told)) == IN_ORDER
        assert tasks_of(SlurmClusterResolver, lambda rank: srun(rank, **told)) == SORTED
        assert tasks_of(resolve, lambda rank: srun(rank, **told)) == SORTED
        pbs = {**told, "PBS_JOBID": "1"}
        assert tasks_of(MpiClusterResolver, lambda rank: mpirun(rank, **pbs)) == IN_ORDER
        flux = {**told, "FLUX_JOB_ID": "f", "FLUX_JOB_SIZE": "6", "FLUX_JOB_NNODES": "1"}
        assert tasks_of(FluxClusterResolver, lambda rank: {**flux, "FLUX_TASK_RANK": str(rank)}) == IN_ORDER

    def test_an_argument_wins(self):
        told = {"MPISTRAT_ROLES": "worker=6", "TF_CONFIG": tf_config({"ps": 2, "worker": 4})}
        assert tasks_of(MpiClusterResolver, lambda rank: mpirun(rank, **told), jobs=JOBS) == IN_ORDER

    def test_spread_goes_with_it(self):
        environ = mpirun(2, MPISTRAT_ROLES=ALL)
        assert MpiClusterResolver(spread="ps", environ=environ).task_type == "ps"

    def test_option_of_the_program(self, monkeypatch):
        monkeypatch.setenv("MPISTRAT_ROLES", "worker=2")
        for name, value in mpirun(5).items():
            monkeypatch.setenv(name, value)
        mpistrat.rc.roles = ALL
        try:
            assert MpiClusterResolver().task_type == "ps"
        finally:
            del mpistrat.rc.roles

    @pytest.mark.parametrize("text", ["chief", "chief=one", "=1", "ps=1,ps=2", "ps=-1", "ps=1;worker=2"])
    def test_that_cannot_be_read(self, text):
        with pytest.raises(OptionError, match=r"^MPISTRAT_ROLES=.* cannot be read: use the tasks of each job"):
            MpiClusterResolver(environ=mpirun(1, MPISTRAT_ROLES=text))

    def test_another_number_of_ranks(self):
        with pytest.raises(RuntimeError, match=r"MPISTRAT_ROLES names 3 tasks, .*but the program has 6 ranks"):
            MpiClusterResolver(environ=mpirun(1, MPISTRAT_ROLES="worker=3"))
        with pytest.raises(RuntimeError, match=r"MPISTRAT_ROLES: .* need 3 tasks, but the step has 6"):
            SlurmClusterResolver(environ=srun(1, MPISTRAT_ROLES="worker=3"))


class TestTFConfig:
    def test_with_parameter_servers_tells_the_jobs(self):
        told = {"TF_CONFIG": tf_config(JOBS)}
        assert tasks_of(MpiClusterResolver, lambda rank: mpirun(rank, **told)) == IN_ORDER
        assert tasks_of(SlurmClusterResolver, lambda rank: srun(rank, **told)) == SORTED
        assert resolve(mpirun(3, **told)).reason.endswith("TF_CONFIG tells the jobs")

    def test_own_task_must_fit(self):
        right = tf_config(JOBS, task={"type": "ps", "index": 1})
        assert MpiClusterResolver(environ=mpirun(5, TF_CONFIG=right)).task_id == 1
        with pytest.raises(RuntimeError, match=r"rank 4 is task 1 of job 'ps' according to TF_CONFIG"):
            MpiClusterResolver(environ=mpirun(4, TF_CONFIG=right))
        assert TFConfigClusterResolver(environ=mpirun(4, TF_CONFIG=right)).task_id == 1

    def test_for_synchronous_training_is_not_used(self):
        told = {"TF_CONFIG": tf_config({"chief": 1, "worker": 2})}
        assert MpiClusterResolver(environ=mpirun(4, **told)).task_id == 4
        assert "TF_CONFIG is not used" in resolve(mpirun(4, **told)).reason

    def test_contradiction(self):
        environ = mpirun(1, MPISTRAT_ROLES=ALL, TF_CONFIG=tf_config({"chief": 1, "worker": 4, "ps": 1}))
        with pytest.raises(RuntimeError, match="MPISTRAT_ROLES and TF_CONFIG contradict each other"):
            MpiClusterResolver(environ=environ)
        environ["TF_CONFIG"] = tf_config(JOBS)
        assert MpiClusterResolver(environ=environ).roles.source == "MPISTRAT_ROLES"
