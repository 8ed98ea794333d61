"""`mpistrat slurm write`, and that the scripts of ``slurm/`` are what it writes."""

import mmap
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mpistrat.cli import commands
from mpistrat.cli.run import job
from mpistrat.launch import srun_types
from tests.selection import core

ROOT = Path(__file__).parents[2]
SCRIPTS = ("array", "container", "cpu", "cpu-mpirun", "elastic", "farm", "gpu", "hetjob", "mpich", "requeue")


@pytest.fixture(autouse=True)
def in_a_folder_with_a_program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("prog.py").touch()


def write(options, *arguments):
    """The script, or the error. Options are separated by spaces."""
    arguments = [*options.split(), *arguments]
    result = CliRunner().invoke(commands, ["slurm", "write", *arguments], prog_name="mpistrat")
    return result.output if result.exit_code == 0 else f"status {result.exit_code}: {' '.join(result.output.split())}"


def started(script, *arguments, **environ):
    """The words after `srun` or `mpirun` that a script starts, and the variables, in a job that Slurm might run."""
    folder = Path("bin")
    folder.mkdir(exist_ok=True)
    for name in ("srun", "mpirun"):
        (folder / name).write_text('#!/bin/sh\nprintf "%s\\n" "${0##*/}" "$@"; exec env >environment\n')
        (folder / name).chmod(0o755)
    Path("script").write_text(script)
    ended = subprocess.run(
        ["bash", "script", *arguments],
        env={"PATH": f"{folder.absolute()}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(Path.cwd()), **environ},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines(), dict(
        line.split("=", 1) for line in Path("environment").read_text().splitlines() if "=" in line
    )


def test_scripts_of_the_tree_are_there():
    assert {path.stem for path in ROOT.glob("slurm/*.sbatch")} == set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_of_the_tree_are_what_is_written(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "slurm" / f"{name}.sbatch").read_text()
    command = [line[2:] for line in text.splitlines() if line.startswith("# mpistrat slurm write ")]
    assert len(command) == 1
    assert write("", *shlex.split(command[0])[3:]) == text


def test_the_command_of_the_documentation():
    script = write("--nodes 4 --ntasks-per-node 8 --gpus-per-node 8 --time 2:00:00 --requeue prog.py")
    options = [line.split()[1] for line in script.splitlines() if line.startswith("#SBATCH")]
    assert options == [
        "--job-name=prog",
        "--time=2:00:00",
        "--output=%x-%j.out",
        "--requeue",
        "--signal=USR2@120",
        "--open-mode=append",
        "--nodes=4",
        "--ntasks-per-node=8",
        "--cpus-per-task=1",
        "--gpus-per-node=8",
    ]
    assert f"python=${{PYTHON:-{sys.executable}}}" in script


def test_arguments_arrive_as_they_are():
    odd = ["it's", 'a  "b"', "$HOME", "*", "%a", "-n", "--nodes", "back\\slash", "ü"]
    words, environ = started(write("--mpi", "pmix", "--nodes", "2", "prog.py", *odd), SLURM_CPUS_PER_TASK="3")
    assert words == ["srun", "--mpi=pmix", "--kill-on-bad-exit=1", sys.executable, "prog.py", *odd]
    assert {environ[name] for name in ("SRUN_CPUS_PER_TASK", "OMP_NUM_THREADS", "MKL_NUM_THREADS")} == {"3"}
    script = write("--mpi=pmix", "-m", "package.train", "-x")
    assert started(script)[0][3:] == [sys.executable, "-m", "package.train", "-x"]
    assert started(script, "other.py", "a b")[0][3:] == [sys.executable, "other.py", "a b"]
    assert "#SBATCH --job-name=train " in script


def test_places_of_python():
    for python, found in {
        "my env/bin/python": f"{Path.cwd()}/my env/bin/python",
        "/usr/my env/python": "/usr/my env/python",
        "python3": "python3",
    }.items():
        assert started(write("--mpi=pmix", "--python", python, "prog.py"))[0][3] == found
    words, _ = started(write("--mpi=pmix prog.py"), PYTHON="py", MPISTRAT_SRUN_MPI="none")
    assert words == ["srun", "--mpi=none", "--kill-on-bad-exit=1", "py", "prog.py"]


def test_ranks_with_gpus_are_spread_evenly():
    """Slurm would fill the first node, with more ranks than it has GPUs."""
    script = write("--mpi=pmix --nodes 2 --ntasks 5 --gpus-per-node 4 prog.py")
    assert "#SBATCH --ntasks=5 " in script
    assert re.search("^#SBATCH --ntasks-per-node=3 +# maximum number of ranks per node$", script, re.MULTILINE)
    for more in ("--ntasks 4 --gpus-per-node 4", "--nodes 2 --ntasks 5"):
        assert "--ntasks-per-node" not in write(f"--mpi=pmix --python p {more} prog.py").split("#SBATCH", 1)[1]


def test_every_option_says_what_it_is_for():
    given = "--mem 8G --partition gpu --constraint a100 --account me --array 0-3 --requeue --gpus-per-node 2"
    options = [line for line in write(f"--mpi=pmix {given} prog.py").splitlines() if line.startswith("#SBATCH")]
    assert len(options) == 15
    assert all(re.fullmatch(r"#SBATCH --[\w-]+(=\S+)? +# \w.+", line) for line in options), options


def test_ranks_wait_for_each_other_in_a_ring():
    """With the tree of Slurm's PMIx, Open MPI crashes in one start of many."""
    script = write("--mpi=pmix prog.py")
    for given, found in (({}, "ring"), ({"SLURM_PMIX_FENCE": "mixed"}, "mixed")):
        assert started(script, **given)[1]["SLURM_PMIX_FENCE"] == found
    assert "SLURM_PMIX_FENCE" not in write("--mpirun --python p prog.py")


def test_array():
    script = write("--mpi=pmix", "--array=0-7%2", "prog.py", "--seed=%a", "%A/%a", "100%")
    environ = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_JOB_ID": "17"}
    assert started(script, **environ)[0][5:] == ["--seed=3", "17/3", "100%"]
    assert started(script, "o.py", "%a", **environ)[0][4:] == ["o.py", "3"]


def test_heterogeneous_job():
    script = write(
        "--ntasks 4 --cpus-per-task 2 --mem 8G : --time=20 --nodes 2 --gpus-per-node 4 --partition gpu --mpi pmix",
        *("prog.py", "x y"),
    )
    first, second = script.split("#SBATCH hetjob")
    assert "--ntasks=4 " in first
    assert "--mem=8G" in first
    assert "--time=20 " in first
    assert all(f"#SBATCH {each}" in second for each in ("--nodes=2", "--ntasks-per-node=4", "--partition=gpu"))
    words, _ = started(
        script, SLURM_HET_SIZE="2", SLURM_CPUS_PER_TASK_HET_GROUP_0="2", SLURM_CPUS_PER_TASK_HET_GROUP_1="1"
    )
    threads = [[f"{name}_NUM_THREADS={n}" for name in ("OMP", "OPENBLAS", "MKL")] for n in (2, 1)]
    program = [sys.executable, "prog.py", "x y"]
    assert words == [
        *("srun", "--mpi=pmix", "--kill-on-bad-exit=1"),
        *("--het-group=0", "--cpus-per-task=2", "env", *threads[0], *program, ":"),
        *("--het-group=1", "--cpus-per-task=1", "env", *threads[1], *program),
    ]


def test_mpirun():
    words, environ = started(
        write("--mpirun", "--ntasks=3", "prog.py"), SLURM_NTASKS="3", SRUN_CPUS_PER_TASK="1", PYTHON="sh"
    )
    assert words == ["mpirun", "-n", "3", "--bind-to", "none", "sh", "prog.py"]
    assert "SRUN_CPUS_PER_TASK" not in environ


def test_container():
    script = write("--mpi=pmix", "--container", "my image.sif", "--gpus-per-node=2", "/opt/prog.py")
    here = str(Path.cwd())
    assert started(script)[0][3:] == [
        *("apptainer", "exec", "--nv", "--bind", here, "--pwd", here, f"{here}/my image.sif", "python3"),
        "/opt/prog.py",
    ]
    assert started(script, IMAGE="/a b.sif")[0][-3] == "/a b.sif"


@pytest.mark.parametrize("image", ["docker://ghcr.io/me/my-image:1.0", "oras://host/x", "library://a/b"])
def test_container_by_its_address(image):
    assert started(write("--mpi=pmix", "--container", image, "prog.py"))[0][-3] == image


@pytest.mark.parametrize("options", ["", "--container a.sif"])
@pytest.mark.parametrize(("status", "told"), [(0, ""), (42, "requeue 17\n"), (143, ""), (1, ""), (137, "")])
def test_requeue(options, status, told):
    """What the ranks end with decides, also where they have no scontrol of their own."""
    script = write(f"--mpi=pmix --requeue --time=10 {options} prog.py")
    words, _ = started(script, SLURM_JOB_ID="17")
    assert words[:4] == ["srun", "--mpi=pmix", "--kill-on-bad-exit=0", "--wait=60"]
    assert words[-1] == "prog.py"
    (Path("bin") / "srun").write_text(f"#!/bin/sh\nexit {status}\n")
    (Path("bin") / "scontrol").write_text('#!/bin/sh\necho "$@"; exit 1\n')  # it may refuse
    (Path("bin") / "scontrol").chmod(0o755)
    environ = {"PATH": f"{Path('bin').absolute()}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(Path.cwd())}
    ended = subprocess.run(
        ["bash", "script"],
        env={**environ, "SLURM_JOB_ID": "17"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, told, "")


def test_modules_are_loaded_before_errors_end_the_script():
    """Those of many sites read variables that are not set."""
    lines = write("--mpi=pmix", "prog.py").splitlines()
    strict = lines.index("set -euo pipefail")
    assert "module load" in lines[strict - 1]
    lines.insert(strict, 'echo "loaded $NOT_SET"; false')
    assert started("\n".join(lines))[0][-1] == "prog.py"


@pytest.mark.parametrize(
    ("family", "plugin"), [("openmpi", "pmix"), ("mpich", "pmi2"), ("intel", "pmi2"), ("cray", "cray_shasta")]
)
def test_mpi_of_the_library(monkeypatch, family, plugin):
    monkeypatch.setattr(job, "library_of", lambda python: family)
    assert f"mpi=${{MPISTRAT_SRUN_MPI:-{plugin}}}\n" in write("prog.py")


def test_mpi_of_an_unknown_library(monkeypatch):
    monkeypatch.setattr(job, "library_of", lambda python: "other")
    assert "give --mpi; `srun --mpi=list` shows all types" in write("prog.py")


def test_mpi_that_srun_does_not_offer(monkeypatch):
    monkeypatch.setattr(job, "library_of", lambda python: "openmpi")
    monkeypatch.setattr(srun_types, "offered", lambda: ["none", "pmi2"])
    assert "this cluster offers only none, pmi2: load the MPI module" in write("prog.py")
    assert "mpi=${MPISTRAT_SRUN_MPI:-pmi2}\n" in write("--mpi=pmi2", "prog.py")


def test_defaults_of_the_site(monkeypatch):
    monkeypatch.setenv("MPISTRAT_SRUN_MPI", "cray_shasta")
    monkeypatch.setenv("MPISTRAT_LAUNCHER", "mpirun")
    assert "exec mpirun" in write("prog.py")
    assert "mpi=${MPISTRAT_SRUN_MPI:-cray_shasta}\n" in write("--srun", "prog.py")
    assert "mpi=${MPISTRAT_SRUN_MPI:-pmix}\n" in write("--srun", "--mpi", "pmix", "prog.py")
    monkeypatch.setenv("MPISTRAT_LAUNCHER", "ssh")
    assert "MPISTRAT_LAUNCHER=ssh cannot be read: use auto, srun or mpirun" in write("prog.py")


def test_mpi_of_no_python():
    assert "/no/python: No such file" in write("--python", "/no/python", "prog.py")
    assert "does not load an MPI library" in write("--python", "/bin/false", "prog.py")


@pytest.mark.mpich
def test_mpi_of_this_python(run_alone):
    found = run_alone("-m", "mpistrat", "slurm", "write", "-m", "x").check()
    found.shows("pmix}" if job.find().family == "openmpi" else "pmi2}")


@pytest.mark.parametrize("options", core(["", "--mpirun"], ""))
@pytest.mark.parametrize(
    ("signals", "restarts", "told", "status"),
    [(2, 0, "requeue 17\n" * 2, 3), pytest.param(1, 100, "", 3, marks=pytest.mark.full), (0, 0, "", 3)],
)
def test_farm(options, signals, restarts, told, status):
    """The shell puts the job back at each signal, and ends with the status of the ranks when these have ended."""
    script = write(f"--mpi=pmix --farm --time=10 {options} prog.py")
    assert "#SBATCH --signal=B:USR2@120" in script
    folder = Path("bin")
    folder.mkdir()
    send = "sleep 0.3; kill -USR2 $PPID; " * signals
    for name, body in {
        "srun": f'[ "$1" != --mpi=none ] || exec touch cleaned; {send} sleep 0.3; exit {status}',
        "mpirun": f"{send} sleep 0.3; exit {status}",
        "scontrol": 'echo "$@" >>told',
        "python": "",  # beside which mpirun is looked for
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    Path("told").touch()
    environ = {
        "PATH": f"{folder.absolute()}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(Path.cwd()),
        "SLURM_JOB_ID": "17",
        "SLURM_NTASKS": "2",
        "PYTHON": str(folder.absolute() / "python"),
        "SLURM_RESTART_COUNT": str(restarts),
    }
    Path("script").write_text(script)
    ended = subprocess.run(["bash", "script"], env=environ, timeout=60, check=False)
    assert ended.returncode == status
    assert Path("told").read_text() == told
    assert Path("cleaned").exists() == (restarts > 0 and not options)


@pytest.mark.parametrize(
    ("ends", "status", "runs", "queued"),
    [
        ([[137], [0]], 0, 2, False),  # a rank is killed
        ([[14, 137], []], 0, 2, False),  # another one notices first
        ([[43, 1], []], 0, 2, False),  # a hang that the watchdog ended
        ([["lost"], []], 0, 2, False),  # no rank could say anything
        ([["lost", 0, "stays"], []], 0, 2, False),  # srun waits for a lost node
        ([["killed", 3]], 3, 1, False),  # an error, and then Slurm kills the other rank before its shell
        ([["later", 0, "stays", 6]], 0, 1, False),  # one rank starts late, and those of another node work for longer
        ([[42, 42, "stays", 6]], 42, 1, True),
        ([[3]], 3, 1, False),
        ([[1, 1]], 1, 1, False),
        ([[143]], 143, 1, False),
        ([[42, 42]], 42, 1, True),
        ([[137], [139], [137]], 137, 3, False),  # without a copy
        ([[]], 0, 1, False),
    ],
    ids=str,
)
def test_elastic(ends, status, runs, queued):
    """Each of ``ends`` has the statuses of the ranks of a run. The fake srun starts two, one after the other."""
    script = write("--mpi=pmix --elastic same --time=10 --ntasks-per-node 2 prog.py")
    folder = Path("bin")
    folder.mkdir()
    memory = Path("memory").absolute()
    srun = """
        for word in "$@"; do [ "$word" != bash ] || break; shift; done
        case "$4" in
        rank) for n in 0 1; do n=$n "$@"; ended=$?; [ "$ended" -eq 0 ] || status=$ended; done
            [ ! -e stays ] || sleep "$(cat stays; rm stays)"; exit "${status:-0}" ;;
        *) exec "$@" ;;
        esac"""
    of_runs = " ".join(f"'{' '.join(map(str, each))}'" for each in ends)
    python = f"""
        runs=({of_runs}) && ends=(${{runs[$MPISTRAT_RESTART]}}) && echo x >>started
        [ -z "${{ends[2]}}" ] || echo "${{ends[3]:-20}}" >stays
        case "${{ends[$n]}}" in
        lost) kill -KILL $PPID ;;
        killed) (sleep 0.2; kill -KILL $PPID) & kill -KILL $$ ;;
        later) sleep 3; exit ;;
        esac
        exit ${{ends[$n]:-0}}"""
    for name, body in {
        "srun": srun,
        "python": python,
        "scontrol": '[ "$1" = show ] && echo node0 || echo "$@" >>told',
    }.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    Path("script").write_text(script.replace("/dev/shm/mpistrat-elastic", str(memory)))
    environ = {
        "PATH": f"{folder.absolute()}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(Path.cwd()),
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "node0",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURMD_NODENAME": "node0",
        "PYTHON": str(folder.absolute() / "python"),
    }
    ended = subprocess.run(["bash", "script"], env=environ, timeout=60, check=False)
    assert ended.returncode == status
    assert len(Path("started").read_text().split()) == 2 * runs
    assert Path("told").exists() == queued
    assert not [*Path.cwd().glob("memory*")]


def test_memory_that_a_killed_run_left_is_removed(tmp_path):
    """By the lines of the script that run on each node: what a process has mapped stays."""
    script = (ROOT / "slurm" / "farm.sbatch").read_text()
    lines = re.search(r"bash -c '(.*?)'", script, re.DOTALL)[1]
    for name in ("mpich_shm_1_0", "mpich_shm_2_0", "other"):
        (tmp_path / name).write_bytes(bytes(4096))
    with Path("mpich_shm_2_0").open("r+b") as file, mmap.mmap(file.fileno(), 0):
        command = ["bash", "-c", lines.replace("/dev/shm", str(tmp_path))]
        subprocess.run(command, timeout=60, check=True)
    assert {path.name for path in tmp_path.iterdir()} == {"mpich_shm_2_0", "other", "prog.py"}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("", "give a program to run"),
        ("-m", "give a program to run"),
        ("missing.py", "there is no program 'missing.py' in "),
        ("--nodes 0 prog.py", "'--nodes': 0 is not in the range x>=1"),
        ("--time 1h prog.py", "'1h' is not like 30, 2:00:00 or 1-12"),
        ("--time 1:2:3:4 prog.py", "is not like 30, 2:00:00"),
        ("--ntasks 2 --ntasks-per-node 2 prog.py", "not both"),
        ("--nodes 4 --ntasks 3 prog.py", "--ntasks 3 leaves some of --nodes 4 without a rank"),
        ("--gpus-per-node 4 --ntasks-per-node 8 prog.py", "8 ranks on a node cannot have a GPU each"),
        ("--nodes 2 --gpus-per-node 2 --ntasks 5 prog.py", "3 ranks on a node cannot have a GPU each"),
        ("--gpus-per-node a100:2 --ntasks-per-node 3 prog.py", "3 ranks on a node cannot have a GPU each"),
        ("--gpus-per-node a100 prog.py", "'a100' is not like 4 or a100:4"),
        ("--mem lots prog.py", "'lots' is not like 64G"),
        ("--partition a;b prog.py", "'a;b' is not like gpu-short"),
        ("--job-name a%b prog.py", "'a%b' is not like"),
        ("--array 1..3 prog.py", "'1..3' is not like 0-7"),
        ("--mpi pmix;ls prog.py", "'pmix;ls' is not like pmix"),
        ("--sbatch nice prog.py", "'nice' is not like --exclusive"),
        ("--requeue --time 3 prog.py", "--time 3 leaves nothing before --signal USR2@120"),
        ("--requeue --signal TERM@60 prog.py", "'TERM@60' is not like USR2@120"),
        ("--farm --time 3 prog.py", "--time 3 leaves nothing before --signal USR2@120"),
        ("--farm --requeue prog.py", "--requeue signals the ranks, and --farm the batch shell"),
        ("--elastic same --requeue prog.py", "--elastic requeues the job, too"),
        ("--elastic fewer --ntasks 4 prog.py", "--elastic takes srun, --nodes and --ntasks-per-node"),
        ("--elastic same --mpirun prog.py", "--elastic takes srun"),
        ("--spare 1 prog.py", "--spare is for --elastic"),
        ("--requeue --mpirun prog.py", "--mpirun cannot let a signal of SLURM reach the ranks"),
        ("--mpirun : --nodes 2 prog.py", "--mpirun cannot start a container or a heterogeneous job"),
        ("--array 0-1 : --nodes 2 prog.py", "no arrays of heterogeneous jobs"),
        ("--nodes x : --nodes 2 prog.py", "'x' is not a valid integer"),
        ("--container a.sif prog.py", "say which MPI is in the image"),
        ("--nodes 2 prog.py : --nodes 2", "srun takes an argument `:` for itself"),
        ("--fly prog.py", "No such option"),
    ],
)
def test_refused(arguments, error):
    output = write(arguments)
    assert output.startswith(("status 1:", "status 2:"))
    assert error in output


def test_refuses_what_would_break_a_line():
    assert "cannot be printed" in write("--mpi=pmix", "prog.py", "a\nb")
    assert "is not like" in write("--mpi=pmix", "--sbatch=--x=1\n#SBATCH --y", "prog.py")


def test_out_is_new_and_whole():
    assert "Submit it with: sbatch 'my job.sbatch'" in write("--mpi=pmix", "--out", "my job.sbatch", "prog.py")
    written = Path("my job.sbatch").read_text()
    assert written == write("--mpi=pmix", "prog.py")
    assert "my job.sbatch exists: remove it" in write("--mpi=pmix", "--nodes=2", "--out=my job.sbatch", "prog.py")
    assert Path("my job.sbatch").read_text() == written
    assert "No such file or directory" in write("--mpi=pmix", "--out=no/where", "prog.py")
    assert sorted(os.listdir()) == ["my job.sbatch", "prog.py"]
