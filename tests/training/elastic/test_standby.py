"""Ranks of the next run that wait: they end with the bits of a run without a loss, as ranks that are started do."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, run_program
from tests.training.elastic.conftest import PROGRAM, named, nothing_left, result

pytestmark = pytest.mark.fault
MODULE = ("-m", "tests.training.elastic.program")


@pytest.mark.mpich
@pytest.mark.parametrize(("mode", "ranks", "program"), [("same", 2, (str(PROGRAM),)), ("fewer", 3, MODULE)])
def test_ranks_that_wait_go_on(run, undisturbed, mode, ranks, program):
    losses = [("step:4", [1], "wait"), ("end:12", "all", "wait")]
    ended = run(ranks, losses, "--elastic", mode, "--standby", program=program)
    assert result(ended) == undisturbed
    ended.shows("began by waiting", "from the copy of step 4", "from the copy of step 12")


def test_a_loss_before_the_first_step_is_followed_by_a_start(run, undisturbed):
    ended = run(2, [("built", [0], "kill")], "--elastic", "--standby")
    assert result(ended) == undisturbed
    assert "began by waiting" not in ended.output


def test_an_error_in_a_run_that_has_waited(run):
    ended = run(2, [("step:4", [1], "wait"), ("step:6", [0], "raise")], "--elastic", "--standby")
    assert ended.status == 1
    ended.shows("ValueError: on purpose", "rank 0 of 2 failed")


def test_ranks_that_wait_end_with_the_job(run):
    """At an error, as at the end of the program."""
    ended = run(2, [("step:4", [1], "wait, then raise")], "--elastic", "--standby")
    assert ended.status == 1
    ended.shows("ValueError: on purpose")


def test_ranks_that_wait_end_with_their_launcher(tmp_path):
    folder = tmp_path / "here"
    command = [sys.executable, "-m", "mpistrat", "run", "-n", "2", "--elastic", "--standby", str(PROGRAM), str(folder)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([*command, '[["step:4", [1], "hang"]]'], env=environ, stderr=subprocess.DEVNULL) as process:
        while len(named("mpistrat.process.standby")) < 3:  # mpirun, and two ranks
            assert process.poll() is None
            time.sleep(0.1)
        variables = [Path(f"/proc/{rank}/environ").read_bytes() for rank in named(folder)]
        process.send_signal(signal.SIGKILL)
    nothing_left(folder, {*os.listdir("/dev/shm")})
    # A process that is killed leaves its copies. Other tests have some at the same time.
    (copies,) = {each for all_of_one in variables for each in re.findall(rb"\0MPISTRAT_ELASTIC=([^\0]+)", all_of_one)}
    shutil.rmtree(copies)


AGAIN = """
import os, pathlib, signal, sys, time
from mpistrat.process import standby

import once
run, folder = os.environ["MPISTRAT_RESTART"], pathlib.Path(os.environ["MPISTRAT_ELASTIC"])
print("run", run, flush=True)
standby.note_imports(folder, int(run), 0)
while len(pathlib.Path(once.imports).read_text()) < 2 + int(run):
    time.sleep(0.02)
if run == "0":
    os.kill(os.getpid(), signal.SIGKILL)
"""
ONCE = """
import builtins, time
imports = __file__ + ".imports"
with open(imports, "a") as file:
    file.write("x")
number = len(open(imports).read())
"""
# The second import, and the fourth, are those of the ranks that wait.
STARTS_MPI = """
assert not hasattr(builtins, "once"), "registered before"
builtins.once = True
from mpi4py import MPI
"""
HANGS = """
if number % 2 == 0:
    time.sleep(300)
"""


@pytest.mark.parametrize("rest", [STARTS_MPI, HANGS], ids=["starts MPI", "hangs"])
def test_a_package_that_ranks_cannot_import_while_they_wait(tmp_path, monkeypatch, rest):
    """It starts MPI, and cannot be imported twice, or does not come to an end: the next run is started."""
    before = {*os.listdir("/dev/shm")}
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "once.py").write_text(ONCE + rest)
    (tmp_path / "program.py").write_text(AGAIN)
    command = [
        sys.executable,
        "-m",
        "mpistrat",
        "run",
        "-n",
        "1",
        "--elastic",
        "--standby",
        str(tmp_path / "program.py"),
    ]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site-packages"))
    ended = run_program([*command, str(tmp_path)], 120)
    assert re.findall("^run .", ended.check().output, re.MULTILINE) == ["run 0", "run 1"], ended
    nothing_left(tmp_path, before)


PRINTS = """
import os, pathlib, signal, sys, time
from mpistrat.process import standby

run = os.environ["MPISTRAT_RESTART"]
print("run", run, __name__, os.path.basename(sys.argv[0]), sys.argv[1:], os.path.isabs(__file__), flush=True)
if run == "0":
    standby.note_imports(pathlib.Path(os.environ["MPISTRAT_ELASTIC"]), 0, 0)
    time.sleep(2)
    os.kill(os.getpid(), signal.SIGKILL)
print("read", sys.stdin.readline().strip(), sys.path[0] == os.path.dirname(__file__))
"""


@pytest.mark.parametrize("options", [["--standby"], []])
def test_input_and_files_of_output(tmp_path, options):
    """The next run reads the input that comes after the loss, and its output follows."""
    program = tmp_path / "program.py"
    program.write_text(PRINTS)
    command = [sys.executable, "-m", "mpistrat", "run", "-n", "1", "--elastic", *options]
    with subprocess.Popen(
        [*command, "--output", tmp_path / "log.%(rank)d", program, "a b"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        while b"goes on" not in process.stderr.readline():
            assert process.poll() is None
        process.communicate(b"a line\n", timeout=60)
    lines = (tmp_path / "log.0").read_text().splitlines()
    assert [each for each in lines if each.startswith(("run", "read"))] == [
        "run 0 __main__ program.py ['a b'] True",
        "run 1 __main__ program.py ['a b'] True",
        "read a line True",
    ]


@pytest.mark.parametrize("arguments", [["--standby", "x.py"], ["--elastic", "--standby", "python", "-c", "1"]])
def test_what_cannot_wait(run_alone, tmp_path, arguments):
    (tmp_path / "x.py").touch()
    ended = run_alone("-m", "mpistrat", "run", *arguments, cwd=tmp_path)
    assert ended.status == 2
    assert re.search("--standby needs --elastic, and a program without", ended.output)
