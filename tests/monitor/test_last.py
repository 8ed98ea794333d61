"""The files in which the last records of jobs are kept."""

import os
import secrets
import stat
import subprocess
import sys
import time

import pytest

import mpistrat
from mpistrat.monitor import last
from mpistrat.record import read

JOB = secrets.token_hex(8)  # other programs of this user may be killed meanwhile
TOKEN = str(secrets.randbits(60))  # of the communicator, by which the records of a job are found
PROGRAM = """
import os, sys
from mpistrat.runtime.agreement.operation import operation
from mpistrat.record import flight_record
record = flight_record.start(0, 1, 0)
if record.path is None:
    sys.exit(77)
flight = record.join(int(sys.argv[1]), 2, 0)
flight.enter(operation("barrier"), 1)
flight.leave()
flight.enter(operation("all_reduce", "SUM"), 2)
print(record.path, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("MPISTRAT_RECORD_DIR", str(tmp_path / "records"))
    return tmp_path / "records"


@pytest.fixture
def killed():
    """The record of a process that was killed inside a collective."""
    environ = {**os.environ, "SLURM_JOB_ID": JOB}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, TOKEN], capture_output=True, text=True, check=False, env=environ
    )
    if ended.returncode == 77:
        pytest.skip("this machine has no /dev/shm")
    path = ended.stdout.strip()
    yield path
    if os.path.exists(path):
        os.unlink(path)


def test_a_rank_that_ended_before_it_was_known_is_kept_with_its_job(killed, directory):
    """The launcher may not have seen it: the other ranks share a communicator with it."""
    other = subprocess.run([sys.executable, "-c", PROGRAM, TOKEN], capture_output=True, text=True, check=False)
    pids = {read.read(killed).pid, read.read(other.stdout.strip()).pid}
    path = last.keep(last.left(0, [min(pids)]), [], failed=True)
    assert {each.pid for each in last.load(path).records} == pids
    assert not os.path.exists(killed)
    assert not os.path.exists(other.stdout.strip())


@pytest.mark.full
def test_a_record_outlives_its_process(killed, directory):
    record = read.read(killed)
    assert not record.lives
    assert [each.pid for each in last.latest(JOB).records] == [record.pid]
    assert stat.S_IMODE(os.stat(killed).st_mode) == 0o600
    (wait,) = record.waits
    assert (wait.last.number, wait.last.operation, wait.size) == (2, "all_reduce SUM", 2)
    path = last.keep(last.left(0, [record.pid]), ["killed"], failed=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not os.path.exists(killed)
    kept = last.load(path)
    assert kept.notes == ("killed",)
    assert (kept.records[0].waits, kept.records[0].entries) == (record.waits, record.entries)
    assert last.latest(JOB) == kept
    assert last.latest(JOB + "0") is None
    ended = subprocess.run(
        [sys.executable, "-m", "mpistrat", "top", "--last", path], capture_output=True, text=True, check=True
    )
    assert "killed\n" in ended.stdout


def test_records_of_other_jobs_stay(killed, directory):
    assert last.left(0, [1]) == []
    assert last.left(0, []) == []  # a launcher whose job ended before it was looked at
    assert last.left(time.time() + 60, [read.read(killed).pid]) == []
    assert os.path.exists(killed)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"records": [{}], "notes": [], "when": 1}'])
def test_a_foreign_file_is_refused(tmp_path, text):
    path = tmp_path / "last-1.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is not the record of a job"):
        last.load(path)


@pytest.mark.parametrize("size", [0, 100, 1 << 20])
def test_a_file_that_is_no_record_is_passed_over(tmp_path, size):
    path = tmp_path / "mpistrat-record-x"
    path.write_bytes(bytes(size))
    assert read.read(path) is None
    assert read.records(str(tmp_path)) == []


def test_the_common_directory_belongs_to_the_user_alone(tmp_path, monkeypatch):
    monkeypatch.delenv("MPISTRAT_RECORD_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = last.reports_folder()
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    made.chmod(0o777)
    with pytest.raises(PermissionError, match="MPISTRAT_RECORD_DIR"):
        last.reports_folder()


def test_the_option_is_an_attribute_too(tmp_path):
    mpistrat.rc.record_dir = tmp_path
    try:
        assert last.reports_folder() == tmp_path
    finally:
        del mpistrat.rc.record_dir
