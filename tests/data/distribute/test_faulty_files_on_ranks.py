"""Tests of faulty data files under several ranks: all ranks raise the error, and soon."""

import fcntl
import hashlib
import re
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

pytestmark = pytest.mark.fault
mpich = pytest.mark.mpich

PROGRAMS = Path(__file__).with_name("programs.py")
LIMIT = 100
FOUND = [
    "truncated", "no HDF5", "0 bytes", "no link", "no dataset", "scalar", "lengths", "dtype", "shape", "filter",
    "vanished", "all empty", "no file", "no match", "too few", "writer",
]  # fmt: skip


@mpich
def test_what_is_wrong_is_said_by_every_rank(run_ranks, tmp_path, summarize):
    ended = run_ranks(3, PROGRAMS, "bad_files", tmp_path, limit=LIMIT).check()
    ended.shows("all cases seen")
    told = re.findall(r"^told (.*) after ([\d.]+)$", ended.output, re.MULTILINE)
    assert [name for name, _ in told] == FOUND
    for name, seconds in told:
        summarize(f"bad file ({name}): told on all of 3 ranks after {seconds} s")


def test_one_open_per_file_for_the_whole_job(run_ranks, tmp_path):
    run_ranks(4, PROGRAMS, "opens_once", tmp_path, limit=LIMIT).check().shows("one open per file")


@mpich
def test_a_line_for_every_epoch_that_a_rank_ends(run_ranks, tmp_path):
    ended = run_ranks(3, PROGRAMS, "paces", tmp_path, limit=LIMIT).check()
    assert ended.output.count("seen") == 3


READ = {
    "truncated_while_read": ("DataFileError: file ", "1.h5', dataset 'x': it was truncated", "bytes now)"),
    "vanished_while_read": ("DataFileError: file ", "1.h5', dataset 'x': it can no longer be found"),
    "vanished_while_several_replicas_read": ("DataFileError: file ", "1.h5', dataset 'x': it can no longer be found"),
    "flipped_while_read": ("ChecksumError: file ", "1.h5', dataset 'x': rows ", "stored checksum is 0x"),
    "not_finite": ("NotFiniteError: file ", "1.h5', dataset 'x': row 301 has the value nan"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[mpich] * (name == "not_finite")) for name in READ])
def test_what_is_found_while_reading_ends_the_job(run_ranks, tmp_path, name, summarize):
    ended = told_when(run_ranks, tmp_path, name, summarize)
    ended.shows(*READ[name], "of 3 failed, which ends the job", "fix: ")
    assert re.search(r"rank \d .*of 3 failed, which ends the job", ended.output), str(ended)


def told_when(run_ranks, tmp_path, name, summarize):
    """Run a job; return how it ended, and report for the summary how long after the fault."""
    ended = run_ranks(3, PROGRAMS, name, tmp_path, limit=LIMIT)
    end = time.time()
    assert ended.status not in (0, None), str(ended)
    (at,) = re.findall(r"^at (\d+\.\d+)$", ended.output, re.MULTILINE)
    summarize(f"bad file ({name}): the job of 3 ranks ended {end - float(at):.1f} s after it went wrong")
    return ended


@mpich
def test_a_killed_rank_leaves_files_as_they_were(run_ranks, tmp_path, summarize):
    def contents():
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}

    for number in range(3):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"] = np.ones((600, 2))
    before = contents()
    told_when(run_ranks, tmp_path, "killed", summarize)
    assert contents() == before
    for path in tmp_path.iterdir():
        with open(path, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with h5py.File(path, "r+") as file:
            file["x"][0] = 2
