"""What the monitor keeps, where a directory cannot be written or has other files in it."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from monitor.records import new_record

from mpistrat.monitor import last
from mpistrat.record import flight_record, layout, read

pytestmark = pytest.mark.skipif(not Path(layout.FOLDER).is_dir(), reason="this machine has no /dev/shm")


@pytest.fixture
def record(monkeypatch):
    # A batch job of its own: records of jobs that other tests have killed may be in memory, too.
    monkeypatch.setenv("SLURM_JOB_ID", f"{os.getpid()}{time.monotonic_ns()}")
    with new_record(1) as made:
        yield read.read(made.path)


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("MPISTRAT_RECORD_DIR", str(tmp_path))
    return tmp_path


def test_records_stay_in_memory_where_no_file_can_be_written(record, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MPISTRAT_RECORD_DIR", str(tmp_path / "file"))
    with pytest.raises(OSError, match="is not a directory"):
        last.keep([record], [], failed=True)
    assert os.path.exists(record.path)
    last.keep([record], [], failed=False)
    assert not os.path.exists(record.path)


FULL = """
import resource, sys
from mpistrat.monitor import last
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    last.write_new("hang.txt", "x" * 100_000)
except OSError as error:
    sys.exit(error.errno)
"""


def test_a_part_of_a_file_is_removed(directory):
    """A limit for the size of files stands for a full disk."""
    ended = subprocess.run([sys.executable, "-c", FULL], check=False, timeout=250)
    assert ended.returncode > 0, signal.Signals(-ended.returncode)
    assert not list(directory.iterdir())


def test_a_reader_sees_a_whole_file_or_none(directory):
    text = "x" * 2_000_000
    seen = []

    def look():
        while len(seen) < 20:
            for path in directory.glob("hang*"):
                seen.append(len(path.read_text()))
                path.unlink()

    looking = threading.Thread(target=look)
    looking.start()
    for number in range(20):
        last.write_new(f"hang-{number}.txt", text)
    looking.join(60)
    assert seen == [len(text)] * 20


def test_files_that_are_damaged_or_foreign_do_not_hide_the_others(record, directory):
    kept = last.keep([record], ["this one"], failed=True)
    (directory / f"last-9{kept.name[5:]}").write_text("{")
    (directory / f"last-8{kept.name[5:]}").write_text('["foreign"]')
    (directory / "last-7.json").mkdir()
    assert last.latest(record.job).notes == ("this one",)
    kept.unlink()
    with pytest.raises(ValueError, match="remove it"):
        last.latest(record.job + "other")


def test_a_pipe_in_the_place_of_a_record_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / f"{layout.PREFIX}pipe")
    assert read.records(str(tmp_path)) == []


def test_reports_of_two_jobs_lie_in_one_directory(directory):
    first = last.write_new("hang-1-node.txt", "one")
    second = last.write_new("hang-2-node.txt", "two")
    assert (first.read_text(), second.read_text()) == ("one", "two")
    with pytest.raises(FileExistsError):
        last.write_new("hang-1-node.txt", "again")


# --- no room in the memory of the node ----------------------------------------------------------------


@pytest.fixture(params=["full", "missing"])
def private_record(request, monkeypatch, tmp_path):
    def refuse(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    if request.param == "full":
        monkeypatch.setattr(layout, "FOLDER", str(tmp_path))
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    else:
        monkeypatch.setattr(layout, "FOLDER", str(tmp_path / "missing"))
    return flight_record.FlightRecord(3, 4)


def test_it_keeps_its_record_to_itself(private_record, tmp_path):
    assert private_record.path is None
    assert list(tmp_path.iterdir()) == []
    private_record.register_stack_signal(41)
    private_record.write_requested_stacks()
    assert read.parse(private_record.contents()).rank == 3
    private_record.close()


def test_its_record_is_kept_like_others(private_record, tmp_path, monkeypatch):
    monkeypatch.setenv("MPISTRAT_RECORD_DIR", str(tmp_path / "records"))
    kept = last.keep([read.parse(private_record.contents())], ["note"], failed=True)
    assert [each.rank for each in last.load(kept).records] == [3]
