"""Programs under `mpistrat run`, on whichever MPI is beside this interpreter."""

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mpistrat.cli.run.job import find
from mpistrat.launch import launchers

ROOT = Path(__file__).parents[3]
FAMILY = find().family
LIMIT = 100

# The first line of each program below. No numpy: it would be half of the time of these tests.
START = """
import os, signal, sys, time
from mpi4py import MPI
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
def tell(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""
WAIT = """
received = []
def receive(number, frame):
    received.append(number)
    tell(rank, "got", signal.Signals(number).name)
for name in sys.argv[1:]:
    signal.signal(signal.Signals[name], receive)
MPI.COMM_WORLD.Barrier()
tell("process", os.getpid())
while len(received) < max(1, len(sys.argv) - 1):
    time.sleep(0.02)
"""


@pytest.fixture
def write(tmp_path):
    """Write a program: `write(text)` is its path."""

    def write(text, start=START):
        program = tmp_path / "prog.py"
        program.write_text(start + textwrap.dedent(text))
        return str(program)

    return write


def environment(**changes):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **changes}
    return {name: value for name, value in environ.items() if value is not None}


def command(*arguments):
    return [sys.executable, "-m", "mpistrat", "run", *map(str, arguments)]


def run(*arguments, stdin=b"", cwd=None, **environ):
    """The status, the output and the errors of `mpistrat run` with these arguments."""
    source = {"stdin": stdin} if isinstance(stdin, int) else {"input": stdin}
    done = subprocess.run(
        command(*arguments),
        capture_output=True,
        timeout=LIMIT,
        cwd=cwd,
        env=environment(**environ),
        check=False,
        **source,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def own(err):
    """The errors without the line that a rank prints in MPI_Abort of MPICH."""
    return re.sub(r"^Abort\(\d+\) on node .*\n", "", err, flags=re.MULTILINE)


def gone(pids, patience=LIMIT):
    """Whether these processes, with the times of their starts, end soon."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if all(start_of(pid) != start for pid, start in pids.items()):
            return True
        time.sleep(0.05)
    return False


def start_of(pid):
    """When a process started, which tells it from a later one of the same number; None if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else fields[18]


@contextlib.contextmanager
def waiting(program, *handled, ranks=2):
    """A job whose ranks wait for a signal: its process, those of its ranks, and how to end it all."""
    with subprocess.Popen(
        command("-n", ranks, program, *handled),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        text=True,
    ) as job:
        pids = {}
        try:
            while len(pids) < ranks:
                line = job.stdout.readline()
                assert line, job.stderr.read()
                pids |= {int(pid): start_of(pid) for pid in re.findall(r"process (\d+)", line)}
            yield job, pids
        finally:
            job.kill()
            for pid, start in pids.items():
                if start is not None and start_of(pid) == start:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def launcher_of(job):
    """The process of MPI's launcher, which starts after the guard."""
    return int(Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()[-1])


def test_success(write):
    program = write("tell(rank, 'of', size, *sys.argv[1:])")
    status, out, err = run("-n", 2, program, "-n", "5", "--help")
    assert sorted(out.splitlines()) == ["0 of 2 -n 5 --help", "1 of 2 -n 5 --help"]
    assert (status, err) == (0, "")


def test_module(write, tmp_path):
    write("tell(__name__, *sys.argv[1:])")
    status, out, err = run("-n", 2, "-m", "prog", "-n", "5", "--dry-run", cwd=tmp_path)
    assert out.splitlines() == ["__main__ -n 5 --dry-run"] * 2
    assert (status, err) == (0, "")


@pytest.mark.full
def test_default_is_one_rank_per_core(write):
    status, out, _ = run(write("tell(size)"), MPISTRAT_X="1")
    assert (status, len(out.splitlines())) == (0, int(out.splitlines()[0]))


@pytest.mark.fault
def test_exit_status(write):
    program = write("sys.exit(3 if rank == 1 else 0)")
    status, out, err = run("-n", 2, program)
    assert (status, out, own(err)) == (3, "", "")


@pytest.mark.fault
@pytest.mark.parametrize("status", [1, 42, 256])
def test_abort(write, status):
    program = write(
        f"""
        sys.stderr.write("last words\\n")
        MPI.COMM_WORLD.Barrier()
        if rank == 1:
            MPI.COMM_WORLD.Abort({status})
        time.sleep({LIMIT})
        """
    )
    found, out, err = run("-n", 2, program)
    if status == 256 and FAMILY == "mpich" and found == 0:
        pytest.xfail("MPICH takes 256 modulo 256, and may end the job before what it says comes out")
    assert found == (status if status < 256 else 1)
    assert (out, own(err)) == ("", "last words\n" * 2)


@pytest.mark.full
def test_debug_is_all_checks(write):
    program = write("import mpistrat; print(*sorted(mpistrat.rc.debug))")
    status, out, err = run("--debug", "-n", 1, program)
    assert (status, out) == (0, "collectives data gradients output random variables\n"), err


@pytest.mark.fault
def test_traceback_is_the_last_thing(write):
    program = write("if rank == 1: raise ValueError('the last thing')\nMPI.COMM_WORLD.Barrier()")
    status, _, err = run("-n", 2, "-m", "mpi4py", program)
    assert status == 1
    assert own(err).endswith("ValueError: the last thing\n")
    assert "---" not in err


@pytest.mark.fault
@pytest.mark.mpich
@pytest.mark.parametrize("left", [0, 3])
def test_a_rank_that_leaves_is_the_end_not_those_that_the_launcher_kills(write, left):
    program = write(
        f"""
        import os
        import mpistrat
        from mpi4py import MPI
        strategy = mpistrat.MultiWorkerMirroredStrategy()
        for step in range(10**6):
            if step == 30 and MPI.COMM_WORLD.rank == 1:
                os._exit({left})
            strategy.reduce("sum", 1.0, axis=None)
        """,
        start="",
    )
    for _ in range(5):  # MPICH calls it a kill in half of the jobs
        status, _, err = run("-n", 3, program)
        assert status == (left or 1), err
        assert re.match(rf"mpistrat run: rank 1 \(.*\) ended by os._exit\({left}\) without telling the others", err)


@pytest.mark.fault
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_killed_by_a_signal(write, number):
    program = write(
        f"""
        MPI.COMM_WORLD.Barrier()
        time.sleep(0.5)  # as a program that does something
        if rank == 1:
            sys.stderr.write("no newline")
            sys.stderr.flush()
            signal.signal({number:d}, signal.SIG_DFL) if {number:d} != 9 else None
            os.kill(os.getpid(), {number:d})
        time.sleep({LIMIT})
        """
    )
    status, out, err = run("-n", 2, program)
    assert status == 128 + number
    assert out == ""
    who, more = "rank 1", ""
    if FAMILY != "openmpi":  # it does not always say
        who, more = "(rank 1|a rank)", r"( or \d+ \(SIG\w+\))*"
    assert re.fullmatch(
        rf"no newline\nmpistrat run: {who} was killed by signal {number:d} \({number.name}\){more}\n", err
    )


@pytest.mark.fault
def test_crash_shows_where(write):
    program = write("import ctypes\nif rank == 1: ctypes.string_at(0)\nMPI.COMM_WORLD.Barrier()")
    status, _, err = run("-n", 2, program)
    assert status == 128 + signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in err
    assert "prog.py" in err
    assert re.search(r"\nmpistrat run: (rank 1|a rank) was killed by signal 11 \(SIGSEGV\)\n$", err)


@pytest.mark.full
def test_standard_input_goes_to_rank_0(write):
    program = write("tell(rank, repr(sys.stdin.read()))")
    assert sorted(run("-n", 2, program, stdin=b"a\nb")[1].splitlines()) == ["0 'a\\nb'", "1 ''"]
    assert sorted(run("-n", 2, program, stdin=b"")[1].splitlines()) == ["0 ''", "1 ''"]
    assert sorted(run("-n", 2, program, stdin=subprocess.DEVNULL)[1].splitlines()) == ["0 ''", "1 ''"]


@pytest.mark.full
def test_long_standard_input(write):
    program = write(
        """
        if rank == 0:
            import zlib
            time.sleep(0.5)  # a reader that is slower than the one who writes
            tell(zlib.crc32(sys.stdin.buffer.read()))
        """
    )
    import zlib

    data = os.urandom(3_000_000)
    assert run("-n", 2, program, stdin=data) == (0, f"{zlib.crc32(data)}\n", "")


@pytest.mark.full
def test_standard_input_that_nobody_reads(write):
    assert run("-n", 2, write("tell(rank)"), stdin=b"x" * 1_000_000)[0] == 0


@pytest.mark.full
def test_standard_input_from_a_file(write, tmp_path):
    (tmp_path / "input").write_text("from a file")
    program = write("if rank == 0: tell(sys.stdin.read())")
    with open(tmp_path / "input") as file:
        assert run("-n", 2, program, stdin=file.fileno()) == (0, "from a file\n", "")


@pytest.mark.full
def test_output_comes_at_once_on_a_terminal(write):
    program = write(
        """
        if rank == 0:
            for step in range(3):
                sys.stderr.write(f"\\r{step}/3")
                sys.stderr.flush()
                sys.stdin.readline()
        """
    )
    terminal, slave = pty.openpty()
    with subprocess.Popen(
        command("-n", 2, program), stdin=subprocess.PIPE, stderr=slave, env=environment(), bufsize=0
    ) as job:
        os.close(slave)
        for step in range(3):
            expected, output = f"\r{step}/3".encode(), b""
            while len(output) < len(expected):  # a terminal may hand it over in parts
                assert select.select([terminal], [], [], LIMIT)[0]
                output += os.read(terminal, 100)
            assert output == expected
            job.stdin.write(b"\n")
        job.stdin.close()
        assert job.wait(LIMIT) == 0
    os.close(terminal)


@pytest.mark.full
def test_lines_of_ranks_do_not_mix(write):
    program = write("for number in range(500): print('line of', rank, number)")
    _, out, _ = run("-n", 2, program)
    assert sorted(out.splitlines()) == sorted(f"line of {rank} {i}" for rank in (0, 1) for i in range(500))


@pytest.mark.full
def test_signals_reach_every_rank(write):
    names = ["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT"]  # the last tells of ranks that go on for long
    with waiting(write(WAIT), *names) as (job, pids):
        launcher = launcher_of(job)
        assert sorted(launchers.ranks_below(launcher)) == sorted(pids)
        assert sorted(launchers.ranks_below(launcher).values()) == [0, 1]
        assert launchers.ranks_below(next(iter(pids))) == {}
        for name in names:
            job.send_signal(signal.Signals[name])
            lines = [job.stdout.readline() for _ in pids]
            assert sorted(lines) == [f"0 got {name}\n", f"1 got {name}\n"]
        assert job.communicate(timeout=LIMIT) == ("", "")
        assert job.returncode == 0
        assert gone(pids)


@pytest.mark.fault
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR2", "SIGHUP", "SIGQUIT"])
def test_signals_that_no_rank_handles(write, name):
    with waiting(write(WAIT)) as (job, pids):
        job.send_signal(signal.Signals[name])
        _, err = job.communicate(timeout=LIMIT)
        assert job.returncode == 128 + signal.Signals[name]
        assert "was killed" not in err
        assert gone(pids)


@pytest.mark.fault
@pytest.mark.skipif(FAMILY != "openmpi", reason="MPICH does not tell a status from a signal")
def test_status_of_ranks_that_a_signal_ends_by_their_own_choice(write):
    program = write(WAIT + "sys.exit(received[0])")
    with waiting(program, "SIGINT") as (job, _):
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=LIMIT)
        assert job.returncode == signal.SIGINT


@pytest.mark.full
@pytest.mark.skipif(FAMILY != "openmpi", reason="the directory of Open MPI")
def test_directory_that_the_user_chose(write, tmp_path):
    chosen = tmp_path / "to" / "be made"
    program = write("tell(os.environ['PMIX_SERVER_TMPDIR'])")
    status, out, _ = run("-n", 1, program, PRTE_MCA_prte_tmpdir_base=str(chosen))
    assert status == 0
    assert out.startswith(str(chosen))
    assert list(chosen.iterdir()) == []


@pytest.mark.fault
def test_interrupt_twice_ends_ranks_that_do_not_listen(write):
    program = write(WAIT + "while True: time.sleep(0.1)")
    with waiting(program, "SIGINT") as (job, pids):
        job.send_signal(signal.SIGINT)
        assert "got SIGINT" in job.stdout.readline()
        said = job.stderr.readline()
        assert re.search(r"not ended 3 s after SIGINT: 0 \(process \d+\), 1 \(.* A second SIGINT", said)
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=LIMIT)
        assert job.returncode > 0
        assert gone(pids)


@pytest.mark.fault
@pytest.mark.parametrize("victim", ["mpistrat", "launcher"])
def test_no_orphans(write, victim):
    with waiting(write(WAIT)) as (job, pids):
        if victim == "mpistrat":
            job.kill()
            assert gone(pids)
            return
        os.kill(launcher_of(job), signal.SIGKILL)
        _, err = job.communicate(timeout=LIMIT)
        assert job.returncode == 128 + signal.SIGKILL
        assert re.search(r"mpirun was killed by signal 9 \(SIGKILL\)\n$", err)
        assert gone(pids)


@pytest.mark.fault
@pytest.mark.skipif(FAMILY != "openmpi", reason="Open MPI names its files after a process id")
def test_a_killed_launcher_is_not_in_the_way_of_the_next(write, tmp_path, monkeypatch):
    # A launcher with the process id of one whose files are left refuses to start.
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with waiting(write(WAIT)) as (job, _):
        os.kill(launcher_of(job), signal.SIGKILL)
        job.communicate(timeout=LIMIT)
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.full
def test_threads_cores_and_other_variables_of_ranks(write):
    names = ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "MPISTRAT_PROGRESS"]
    unset = dict.fromkeys((*names, "BLIS_NUM_THREADS", "NUMEXPR_NUM_THREADS"))
    cores = sorted(os.sched_getaffinity(0))
    told = f"*(os.environ.get(name) for name in {names}), 'cores', *sorted(os.sched_getaffinity(0))"
    program = write(f"tell(MPI.COMM_WORLD.allreduce(1), {told})")
    not_bound = " ".join(map(str, ["None", "cores", *cores]))
    ranks = len(cores) + 1  # more than there are cores
    assert run("-n", ranks, program, **unset) == (0, f"{ranks} 1 1 1 {not_bound}\n" * ranks, "")
    seven = {**unset, "OMP_NUM_THREADS": "7"}
    assert run("-n", 2, program, **seven) == (0, f"2 7 7 7 {not_bound}\n" * 2, "")
    status, out, err = run("-n", 2, "--bind", program)
    assert (status, err) == (0, "")
    if FAMILY == "openmpi":
        assert all(len(line.partition("cores")[2].split()) == 1 for line in out.splitlines())


@pytest.mark.full
def test_inside_of_another_job(write):
    program = write(
        """
        import subprocess
        if len(sys.argv) > 1:
            tell("inner", rank, size)
        elif rank == 0:
            sys.exit(subprocess.run([sys.executable, "-m", "mpistrat", "run", "-n", "3", __file__, "x"]).returncode)
        """
    )
    status, out, err = run("-n", 2, program)
    assert sorted(out.splitlines()) == ["inner 0 3", "inner 1 3", "inner 2 3"]
    assert (status, err) == (0, "")


@pytest.mark.full
def test_on_a_bare_machine(write, tmp_path):
    """No ssh, no other program, and the variables of a batch job on other nodes."""
    (tmp_path / "bin").mkdir()
    for name in ("sh", "env"):
        (tmp_path / "bin" / name).symlink_to(f"/bin/{name}")
    batch = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOBID": "7",
        "SLURM_NODELIST": "n[1-2]",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_TASKS_PER_NODE": "1(x2)",
    }
    program = write("tell(MPI.COMM_WORLD.allreduce(1))")
    assert run("-n", 3, program, PATH=str(tmp_path / "bin"), **batch) == (0, "3\n" * 3, "")


@pytest.mark.fault
def test_a_reader_that_leaves(write):
    program = write("while True: tell('line'); time.sleep(0.05)")
    with subprocess.Popen(
        command("-n", 2, program),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(),
    ) as job:
        assert job.stdout.readline() == b"line\n"
        job.stdout.close()
        assert job.wait(LIMIT) != 0


def on_terminal(program, talk, ranks=2):
    """The status and the output of a job on a terminal of its own, to which `talk` talks."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, command("-n", ranks, program), environment())
    output = b""
    end = time.monotonic() + LIMIT
    spoken = False
    while time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                data = os.read(terminal, 1000)
            except OSError:  # its end
                data = b""
            if not data:
                break
            output += data
        if not spoken and b"ready" in output:
            os.write(terminal, talk)
            spoken = True
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(terminal)
    return status, output.decode().replace("\r\n", "\n")


# CPython 3.12 warns of a fork where there are threads. The child only executes.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.full
def test_terminal(write):
    program = write(
        """
        if rank == 0:
            tell("ready", os.isatty(1), os.isatty(2))
            tell("read", repr(sys.stdin.readline()), repr(sys.stdin.readline()))
        """
    )
    status, output = on_terminal(program, b"typed\n\x04")
    assert "ready True True\n" in output
    assert "read 'typed\\n' ''\n" in output
    assert status == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.fault
def test_interrupt_from_the_terminal(write):
    program = write(
        f"""
        try:
            MPI.COMM_WORLD.Barrier()
            if rank == 0:
                tell("ready")
            time.sleep({LIMIT})
        except KeyboardInterrupt:
            tell(rank, "interrupted")
        """
    )
    status, output = on_terminal(program, b"\x03")
    assert sorted(re.findall(r"\d interrupted", output)) == ["0 interrupted", "1 interrupted"]
    assert status == 0


def test_dry_run(write):
    program = write("tell('started')")
    status, out, err = run("-n", 500, "--dry-run", program, "--flag", OMP_NUM_THREADS=None, PMI_RANK="0", PMI_FD="5")
    lines = out.splitlines()
    assert (status, err) == (0, "")
    assert lines[0].startswith(find().path)
    assert lines[0].endswith(f"{sys.executable} {program} --flag")
    assert " -n 500 " in lines[0]
    assert ("--allow-run-as-root" in lines[0]) == (FAMILY == "openmpi" and os.geteuid() == 0)
    settings = lines[1:]
    assert all(re.match(r"(\w+=\S+|-u \w+) +# \S", line) for line in settings)
    assert any(line.startswith("OMP_NUM_THREADS=1 ") and "500 ranks share" in line for line in settings)
    assert any(line.startswith("-u PMI_FD ") for line in settings)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "2"], "give a program to run"),
        (["-n", "2", "missing.py"], "there is no program 'missing.py'"),
        (["-n", "0", "prog.py"], "0 is not in the range"),
        (["-n", "2", "--mpi", "mpicc", "prog.py"], "'mpicc' is not one of"),
    ],
)
def test_wrong_arguments(arguments, words):
    status, out, err = run(*arguments)
    assert status == 2
    assert words in err
    assert out == ""


def test_other_mpi(write):
    other = "mpich" if FAMILY == "openmpi" else "openmpi"
    status, _, err = run("-n", 2, "--mpi", other, write("tell('started')"))
    assert status == 1
    assert f"pip install {other}" in err
