"""Resolvers for ranks of mpirun and mpiexec of all kinds, with nodes from PBS, LSF and Flux."""

import os

import pytest

from mpistrat.cluster_resolver import (
    FluxClusterResolver,
    MpiClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    resolve,
)

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_HOSTNAME": "b",
    "PMIX_RANK": "3",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_HOSTNAME": "b"}
CRAY_PMI = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
PALS = {**CRAY_PMI, "PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2", "PALS_NODEID": "1"}
MVAPICH = {
    f"MV2_COMM_WORLD_{name}": value
    for name, value in {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items()
}
MPIRUNS = {"Open MPI": OPEN_MPI, "MPICH": HYDRA, "Cray PMI": CRAY_PMI, "PALS": PALS, "MVAPICH": MVAPICH}
LSF = {"LSB_JOBID": "17", "LSB_MCPU_HOSTS": "a 2 b 2"}
JSRUN = {
    "LSB_JOBID": "17",
    "LSB_MCPU_HOSTS": "batch5 1 a 42 b 42",
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
FLUX = {
    "FLUX_JOB_ID": "f23r45t",
    "FLUX_JOB_SIZE": "4",
    "FLUX_JOB_NNODES": "2",
    "FLUX_TASK_RANK": "3",
    "FLUX_TASK_LOCAL_ID": "1",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "CUDA_VISIBLE_DEVICES": "-1",
}


@pytest.fixture
def pbs(tmp_path):
    """``pbs(*lines)``: return the variables that PBS sets in a job with these nodes."""

    def make(*lines):
        file = tmp_path / "nodefile"
        file.write_text("".join(f"{line}\n" for line in lines))
        return {"PBS_JOBID": "17.server", "PBS_NODEFILE": str(file)}

    return make


def check(placement, nodes=("a", "b")):
    """Assert that this is rank 3 of 4, with two ranks on each node."""
    assert (placement.size, placement.rank) == (4, 3)
    assert (placement.local_rank, placement.local_size) == (1, 2)
    if nodes is not None:
        assert (placement.nodes, placement.node, placement.host) == (nodes, 1, nodes[1])
        assert (placement.ranks_per_node, placement.node_of_rank) == ((2, 2), (0, 0, 1, 1))
    assert all(fact.source for fact in placement.facts())


class TestMpirun:
    @pytest.mark.parametrize("mpi", MPIRUNS)
    def test_without_a_scheduler(self, mpi):
        resolver = resolve(dict(MPIRUNS[mpi]))
        assert type(resolver) is MpiClusterResolver
        check(resolver.placement, None)
        assert resolver.placement.nodes is None
        assert mpi.split()[0] in resolver.reason or mpi == "Cray PMI"

    @pytest.mark.parametrize("mpi", MPIRUNS)
    def test_on_one_node(self, mpi):
        environ = {
            name: "4" if value == "2" else "3" if value == "1" else value
            for name, value in MPIRUNS[mpi].items()
            if name != "PALS_NODEID"
        }
        placement = resolve({**environ, "SLURMD_NODENAME": "b", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}).placement
        assert (placement.nodes, placement.node, placement.node_of_rank) == (("b",), 0, (0, 0, 0, 0))
        assert (placement.local_rank, placement.device) == (3, "cuda:3")

    @pytest.mark.parametrize("mpi", MPIRUNS)
    @pytest.mark.parametrize("lines", ["aabb", "ab"])
    def test_in_pbs(self, mpi, lines, pbs):
        resolver = resolve({**pbs(*lines), **MPIRUNS[mpi]})
        assert type(resolver) is MpiClusterResolver
        check(resolver.placement)
        assert resolver.placement.job == "17.server"
        assert resolver.placement.sources["nodes"] == "PBS_NODEFILE"
        assert resolver.cluster_spec().as_dict() == {"worker": ["a:8888", "a:8889", "b:8888", "b:8889"]}

    @pytest.mark.parametrize("mpi", MPIRUNS)
    def test_in_lsf(self, mpi):
        resolver = resolve({**LSF, **MPIRUNS[mpi]})
        assert type(resolver) is MpiClusterResolver
        check(resolver.placement)

    @pytest.mark.parametrize("mpi", MPIRUNS)
    def test_in_slurm(self, mpi):
        slurm = {
            "SLURM_JOB_ID": "1",
            "SLURM_JOB_NODELIST": "a,b",
            "SLURM_JOB_CPUS_PER_NODE": "2(x2)",
            "SLURM_PROCID": "1",
            "SLURM_STEP_NUM_TASKS": "2",
        }
        resolver = resolve({**slurm, **MPIRUNS[mpi]})
        assert type(resolver) is MpiClusterResolver
        check(resolver.placement)
        assert "SLURM_PROCID and SLURM_STEP_* are not its own" in resolver.reason

    def test_full_names(self, pbs):
        environ = {**OPEN_MPI, **pbs("a.cluster.org", "b.cluster.org")}
        check(MpiClusterResolver(environ=environ).placement, ("a.cluster.org", "b.cluster.org"))

    def test_slots_tell_what_the_launcher_does_not(self):
        """A launcher may tell only rank and size."""
        environ = {"PMI_RANK": "3", "PMI_SIZE": "4", "LSB_JOBID": "17", "LSB_MCPU_HOSTS": "a 3 b 1"}
        placement = resolve(environ).placement
        assert (placement.node, placement.local_rank, placement.local_size) == (1, 0, 1)
        assert placement.node_of_rank == (0, 0, 0, 1)

    @pytest.mark.parametrize("hosts", ["a 8 b 8 c 8", "a 3 b 3", "c 2 d 2"])
    def test_nodes_that_do_not_fit(self, hosts):
        environ = {**OPEN_MPI, **LSF, "LSB_MCPU_HOSTS": hosts}
        if hosts == "a 3 b 3":  # two ranks on each node, with room for three
            check(resolve(environ).placement)
            return
        placement = resolve(environ).placement
        assert placement.nodes is None
        assert placement.node_of_rank is None
        assert (placement.host, placement.local_rank) == ("b", 1)
        assert placement.allocation == tuple(hosts.split()[::2])

    def test_ranks_of_a_daemon_share_what_it_sees(self):
        """mpirun runs in a job whose own tasks would see one of the two GPUs each."""
        environ = {**OPEN_MPI, "SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "2,3"}
        resolver = MpiClusterResolver(environ=environ)
        assert (resolver.placement.gpu, resolver.placement.device) == ("3", "cuda:1")
        assert resolver.num_accelerators() == {"GPU": 1}

    def test_gpus_are_counted(self, tmp_path, monkeypatch):
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\nfor i in 0 1 2 3 4; do echo GPU $i; done\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        assert MpiClusterResolver(environ=OPEN_MPI).num_accelerators() == {"GPU": 2}
        assert MpiClusterResolver(environ={}).num_accelerators() == {"GPU": 5}
        monkeypatch.setenv("PATH", "")
        assert MpiClusterResolver(environ=OPEN_MPI).num_accelerators() == {}

    def test_size_is_not_told(self):
        with pytest.raises(RuntimeError, match=r"\(PMIX_RANK=3\), but no variable says how many ranks"):
            resolve({"PMIX_RANK": "3", "PMIX_NAMESPACE": "x"})

    def test_contradictory(self):
        with pytest.raises(RuntimeError, match="PMI_RANK=5, but PMI_SIZE=4"):
            resolve({**HYDRA, "PMI_RANK": "5"})

    def test_unreadable(self):
        with pytest.raises(ValueError, match="PMI_RANK must be a number from 0 on, not 'x'"):
            resolve({**HYDRA, "PMI_RANK": "x"})


class TestOwnLaunchers:
    """A scheduler's own launcher may speak PMI or PMIx: the task is then not a rank of mpirun."""

    STEP = {
        "SLURM_PROCID": "3",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "a,b",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_JOB_ID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
    }

    @pytest.mark.parametrize("spoken", [{}, CRAY_PMI, PALS, HYDRA, {"PMIX_RANK": "3"}])
    def test_srun(self, spoken):
        resolver = resolve({**self.STEP, **spoken})
        assert type(resolver) is SlurmClusterResolver
        check(resolver.placement)
        assert resolver.reason == "srun started this task (SLURM_STEP_NUM_TASKS=4)"

    @pytest.mark.parametrize(
        "spoken", [{"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.1.0"}, {"PMI_RANK": "3", "PMI_SIZE": "4"}]
    )
    def test_srun_called_by_a_rank_of_mpirun(self, spoken):
        around = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"}
        resolver = resolve({**around, **self.STEP, "SLURM_STEP_NUM_NODES": "2", **spoken})
        assert type(resolver) is SlurmClusterResolver
        check(resolver.placement)

    @pytest.mark.parametrize(
        "spoken",
        [
            {"PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun-b-17@1", "PMI_RANK": "1", "PMI_SIZE": "2"},
            {"PMIX_NAMESPACE": "slurm.pmix.1.0"},
        ],
    )
    def test_mpirun_in_srun(self, spoken):
        """The daemons of mpirun, one on each node, pass on the variables that srun set for them."""
        step = {**self.STEP, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}
        step |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_JOB_NODELIST": "a,b"}
        resolver = resolve({**step, **OPEN_MPI, **spoken})
        assert type(resolver) is MpiClusterResolver
        check(resolver.placement, None)

    @pytest.mark.parametrize("spoken", [{}, CRAY_PMI, PALS, {"PMIX_RANK": "3"}])
    @pytest.mark.parametrize("around", [{}, {**STEP, "SLURM_STEP_NUM_TASKS": "2"}])
    def test_flux(self, spoken, around):
        """A Flux instance may itself be a step of Slurm."""
        resolver = resolve({**around, **FLUX, **spoken})
        assert type(resolver) is FluxClusterResolver
        placement = resolver.placement
        check(placement, None)
        assert (placement.node, placement.nodes, placement.num_nodes) == (1, None, 2)
        assert (placement.gpus, placement.device) == ((), "cpu:0")

    def test_flux_in_a_step_has_nodes_of_its_own(self):
        """The brokers of Flux are the step's tasks, and pass on the names of their own nodes."""
        environ = {**FLUX, **self.STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURMD_NODENAME": "a"}
        resolver = FluxClusterResolver(nodes="a,b", environ={**environ, "FLUX_TASK_LOCAL_ID": "1"})
        check(resolver.placement)

    def test_started_by_ssh(self, monkeypatch):
        """mpiexec passes on the name of the node on which it was called."""
        monkeypatch.setattr("mpistrat.cluster_resolver.mpi.own_host", lambda: "b.cluster.org")
        slurm = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a,b", "SLURM_JOB_CPUS_PER_NODE": "2(x2)"}
        told = {name: value for name, value in HYDRA.items() if name != "PMI_HOSTNAME"}
        for name in [each for each in os.environ if each.startswith(("SLURM", "OMPI_", "PMI"))]:
            monkeypatch.delenv(name)
        for name, value in {**slurm, **told, "SLURMD_NODENAME": "a"}.items():
            monkeypatch.setenv(name, value)
        check(resolve().placement)

    BATCH = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a,b", "SLURM_JOB_CPUS_PER_NODE": "2(x2)"}
    SHELL = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "a", "SLURM_STEP_NUM_TASKS": "1"}
    PROXIES = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "a,b", "SLURM_EXTERNAL_LAUNCHER": "1"}

    @pytest.mark.parametrize(
        ("around", "name", "source"),
        [(BATCH, "a", "SLURM_JOB_NODELIST"), (SHELL, "a", "SLURM_JOB_NODELIST"), (PROXIES, "b", "SLURMD_NODENAME")],
    )
    @pytest.mark.parametrize("mpi", ["MPICH", "MVAPICH"])
    def test_environment_of_another_rank(self, around, name, source, mpi, monkeypatch):
        """The rank is neither on this machine nor on the one where mpiexec was called."""
        monkeypatch.setattr("mpistrat.cluster_resolver.mpi.own_host", lambda: "a")
        told = {each: value for each, value in MPIRUNS[mpi].items() if each != "PMI_HOSTNAME"}
        placement = resolve({**around, **told, "SLURMD_NODENAME": name}).placement
        check(placement)
        assert placement.sources["host"] == source

    def test_environment_of_another_rank_on_one_node(self):
        environ = {**self.BATCH, "PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
        placement = resolve({**environ, "SLURMD_NODENAME": "a"}).placement
        assert (placement.nodes, placement.host, placement.local_rank) == (("a",), "a", 1)

    def test_mpirun_in_flux(self):
        resolver = resolve({**FLUX, **OPEN_MPI, "FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"})
        assert type(resolver) is MpiClusterResolver

    def test_jsrun(self):
        resolver = resolve(dict(JSRUN))
        assert type(resolver) is MpiClusterResolver
        check(resolver.placement)
        assert resolver.placement.sources["rank"] == "JSM_NAMESPACE_RANK"

    @pytest.mark.parametrize("sets", [1, 2, 3])
    @pytest.mark.parametrize(("ranks", "each"), [(1, 1), (2, 2), (3, 3), (6, 3), (4, 2), (2, 3), (1, 3), (3, 1)])
    def test_gpus_of_a_resource_set(self, sets, ranks, each):
        """The ranks of ``jsrun -r sets -a ranks -g each`` use the GPUs of their resource set evenly."""
        size = sets * ranks
        users = {}
        for rank in range(size):
            first = rank // ranks * each
            environ = {"JSM_NAMESPACE_RANK": rank, "JSM_NAMESPACE_SIZE": size, "JSM_NAMESPACE_LOCAL_RANK": rank}
            environ |= {"JSM_NAMESPACE_LOCAL_SIZE": size, "LSB_JOBID": 17, "LSB_MCPU_HOSTS": "batch5 1 a 42"}
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(first, first + each)))
            placement = resolve({name: str(value) for name, value in environ.items()}).placement
            assert placement.gpu == str(first + int(placement.device.removeprefix("cuda:")))
            users.setdefault(placement.gpu, []).append(rank)
        counts = sorted(map(len, users.values()))
        assert len(users) == sets * min(ranks, each)
        assert counts[-1] - counts[0] <= 1

    def test_mpirun_in_jsrun(self):
        resolver = resolve({**JSRUN, "JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "1"})
        assert resolver.placement.sources["rank"] == "OMPI_COMM_WORLD_RANK"


class TestPbs:
    def test_script(self, pbs):
        resolver = resolve(pbs("a", "b"))
        assert type(resolver) is MpiClusterResolver
        placement = resolver.placement
        assert (placement.size, placement.rank, placement.allocation) == (1, 0, ("a", "b"))

    def test_file_is_on_another_node(self):
        placement = resolve({**OPEN_MPI, "PBS_JOBID": "17", "PBS_NODEFILE": "/nowhere"}).placement
        check(placement, None)
        assert placement.nodes is None


class TestLsf:
    def test_hosts_of_a_file_or_a_list(self, tmp_path):
        file = tmp_path / "hosts"
        file.write_text("a\na\nb\nb\n")
        for name, value in {"LSB_DJOB_HOSTFILE": str(file), "LSB_HOSTS": "a a b b"}.items():
            placement = resolve({"LSB_JOBID": "17", name: value, **OPEN_MPI}).placement
            check(placement)
            assert placement.sources["nodes"] == name

    def test_array(self):
        assert resolve({**LSF, **OPEN_MPI, "LSB_JOBINDEX": "4"}).placement.job == "17[4]"
        assert resolve({**LSF, **OPEN_MPI, "LSB_JOBINDEX": "0"}).placement.job == "17"

    @pytest.mark.parametrize("hosts", ["a", "a x", "a 2 b"])
    def test_unreadable(self, hosts):
        with pytest.raises(ValueError, match="LSB_MCPU_HOSTS cannot be read"):
            MpiClusterResolver(environ={**LSF, "LSB_MCPU_HOSTS": hosts})


class TestFlux:
    @pytest.fixture
    def command(self, tmp_path, monkeypatch):
        """``command(text, status)``: put a command flux on PATH that prints this and ends with this status."""

        def make(text, status=0):
            program = tmp_path / "flux"
            program.write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/asked\necho "{text}"\nexit {status}\n')
            program.chmod(0o755)
            monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
            return tmp_path / "asked"

        return make

    def test_asks_for_names(self, command):
        asked = command("node[1-2]")
        resolver = FluxClusterResolver(environ={**FLUX, "PATH": os.environ["PATH"]})
        assert not asked.exists()
        assert resolver.master() == "grpc://node2:8889"
        assert asked.read_text() == "jobs -n -o {nodelist} f23r45t\n"
        check(resolver.placement, ("node1", "node2"))

    @pytest.mark.parametrize(("text", "status"), [("no such job", 1), ("", 0)])
    def test_is_not_told_names(self, command, text, status):
        command(text, status)
        with pytest.raises(RuntimeError, match=r"does not tell them: (no such job|it printed nothing)"):
            FluxClusterResolver(environ={**FLUX, "PATH": os.environ["PATH"]}).cluster_spec()

    def test_has_no_command(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(RuntimeError, match=r"FluxClusterResolver\(nodes="):
            FluxClusterResolver(environ={**FLUX, "PATH": str(tmp_path)}).cluster_spec()

    def test_is_given_names(self):
        check(FluxClusterResolver(nodes="node[1-2]", environ=FLUX).placement, ("node1", "node2"))
        check(FluxClusterResolver(nodes=["x", "y"], environ=FLUX).placement, ("x", "y"))
        with pytest.raises(ValueError, match="the job has 2 nodes"):
            FluxClusterResolver(nodes="node[1-3]", environ=FLUX)

    def test_uneven(self):
        placement = FluxClusterResolver(environ={**FLUX, "FLUX_JOB_SIZE": "5"}).placement
        assert (placement.size, placement.local_rank, placement.node_of_rank) == (5, 1, None)

    def test_outside(self):
        with pytest.raises(RuntimeError, match="FLUX_TASK_RANK is not set"):
            FluxClusterResolver(environ=OPEN_MPI)


class TestAlone:
    def test_nothing_is_set(self):
        resolver = resolve({})
        assert type(resolver) is MpiClusterResolver
        assert (resolver.placement.size, resolver.placement.rank, resolver.task_id) == (1, 0, 0)
        assert resolver.reason == "no launcher started this process: it is rank 0 of 1"

    def test_this_process(self, monkeypatch):
        for name in list(os.environ):
            if name.startswith(("OMPI_", "PMI", "SLURM", "FLUX", "JSM", "PBS_", "LSB_", "PALS_", "TF_CONFIG")):
                monkeypatch.delenv(name)
        resolver = resolve(rpc_layer=None)
        host = os.uname().nodename
        assert resolver.cluster_spec().as_dict() == {"worker": [f"{host}:8888"]}
        assert (resolver.placement.host, resolver.master()) == (host, f"{host}:8888")

    def test_tf_config(self):
        config = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
        resolver = resolve({"TF_CONFIG": config})
        assert type(resolver) is TFConfigClusterResolver
        assert (resolver.master(), resolver.placement.rank) == ("grpc://b:1", 1)
        assert "TF_CONFIG names the cluster" in resolver.reason
        resolver = resolve({"TF_CONFIG": config, **OPEN_MPI})
        assert type(resolver) is MpiClusterResolver
        assert "TF_CONFIG is not used" in resolver.reason

    @pytest.mark.parametrize("config", ["", "{}", '{"cluster": {}}'])
    def test_empty_tf_config(self, config):
        assert type(resolve({"TF_CONFIG": config})) is MpiClusterResolver


@pytest.mark.parametrize(
    "names", [{"PBS_JOBID": "3", "PBS_NODEFILE": "{}"}, {"LSB_JOBID": "3", "LSB_DJOB_HOSTFILE": "{}"}]
)
def test_a_file_of_nodes_that_is_no_text(tmp_path, names):
    path = tmp_path / "nodes"
    path.write_bytes(b"\xff\xfe\n")
    environ = {name: value.format(path) for name, value in names.items()}
    placement = resolve({**environ, "PMI_RANK": "2", "PMI_SIZE": "3"}).placement
    assert (placement.rank, placement.nodes) == (2, None)
