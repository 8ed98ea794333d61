"""``mpistrat top`` on other nodes, which stand-ins for srun and ssh stand for."""

import json
import os

import pytest
from click.testing import CliRunner

from mpistrat.cli import commands
from mpistrat.cli import top as top_command

ROW = {"host": "a", "pid": 1, "step": 3, "step_seconds": 0.5, "phase": "user code", "for_seconds": 1.0}
ROW |= {"collective": "", "bytes_per_second": 0.0, "resident_bytes": 1e6}


def top(*arguments):
    return CliRunner().invoke(commands, ["top", *arguments])


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """``stand_in(name, *lines)``: a program that notes its arguments, and does this."""

    def make(name, *lines):
        for each in (name, "squeue"):  # that of a real Slurm would look for its server
            program = tmp_path / each
            if not program.exists():
                program.write_text("#!/bin/sh\nexit 1\n")
                program.chmod(0o755)
        program = tmp_path / name
        said = f'echo "$@" >> {tmp_path}/{name}.said\nenv | grep ^SLURM_ > {tmp_path}/environ\n'
        program.write_text("#!/bin/sh\n" + said + "\n".join(lines) + "\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return tmp_path

    return make


def rows(*ranks):
    return f"echo '{json.dumps([{**ROW, 'rank': rank} for rank in ranks])}'"


def test_hosts_are_asked_through_ssh(stand_in):
    folder = stand_in("ssh", 'case "$*" in *"-- one "*)', rows(1), ";; *)", rows(0), ";; esac")
    ended = top("--json", "one", "two")
    assert ended.exit_code == 0, ended.output
    assert [row["rank"] for row in json.loads(ended.stdout)] == [0, 1]
    said = (folder / "ssh.said").read_text()
    assert "BatchMode=yes" in said
    assert said.count("children.py mpistrat top --here --json") == 2


def test_a_host_that_does_not_answer(stand_in):
    stand_in("ssh", 'case "$*" in *"-- one "*)', rows(0), ";; *) echo no route to host >&2; exit 255;; esac")
    ended = top("--json", "one", "two")
    assert [row["rank"] for row in json.loads(ended.stdout)] == [0]
    assert ended.stderr == "no route to host\n"
    ended = top("two")
    assert ended.exit_code == 1
    assert "no route to host" in ended.stderr
    assert "for a job of Slurm, give its number" in ended.stderr


def test_two_jobs_are_refused():
    ended = top("4711", "4712")
    assert ended.exit_code == 1
    assert "give one JOB, or names of hosts, not 4711 4712" in ended.stderr


def test_lines_of_others_are_left_out(stand_in):
    stand_in("srun", "echo '[node0:17] a warning'", "echo '[1, 2]'", rows(1), rows(0), "echo '[{'")
    ended = top("--json", "4242424242")
    assert [row["rank"] for row in json.loads(ended.stdout)] == [0, 1]


def test_the_step_is_not_told_of_the_one_around_it(stand_in, monkeypatch):
    for name in ("SLURM_NTASKS", "SLURM_STEP_ID", "SLURM_CPU_BIND", "SLURM_CONF"):
        monkeypatch.setenv(name, "8")
    folder = stand_in("srun", rows(0))
    assert top("--json", "4242424242").exit_code == 0
    assert (folder / "environ").read_text() == "SLURM_CONF=8\n"


def test_all_nodes_of_the_job_are_asked(stand_in):
    stand_in("squeue", "echo 3")
    folder = stand_in("srun", rows(0))
    assert top("--json", "4242424242").exit_code == 0
    assert "--jobs=4242424242" in (folder / "squeue.said").read_text()
    assert "--nodes=3" in (folder / "srun.said").read_text()


def test_the_stacks_of_all_nodes(stand_in):
    folder = stand_in("srun", "echo on node0:", "echo rank 0: user code")
    assert top("--stacks", "4242424242").stdout == "on node0:\nrank 0: user code\n"
    assert "--here --stacks 4242424242" in (folder / "srun.said").read_text()


def test_a_job_that_has_ended(stand_in):
    stand_in("srun", "echo 'srun: error: Job 42 has ended' >&2; exit 1")
    ended = top("4242424242")
    assert ended.exit_code == 1
    assert "Job 42 has ended" in ended.stderr


def test_srun_that_does_not_come_back(stand_in, monkeypatch):
    monkeypatch.setattr(top_command, "_LIMIT", 0.2)
    stand_in("srun", "exec sleep 60")
    ended = top("4242424242")
    assert ended.exit_code == 1
    assert "srun took longer than 0.2 s" in ended.stderr
