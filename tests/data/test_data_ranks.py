"""Data files under several ranks: what is wrong with them is known everywhere, and soon."""

import fcntl
import hashlib
from pathlib import Path

import h5py
import numpy as np
import pytest

pytestmark = [pytest.mark.mpich, pytest.mark.fault]

PROGRAMS = Path(__file__).with_name("programs.py")
LIMIT = 40


def test_what_is_wrong_is_said_by_every_rank(run_ranks, tmp_path):
    run_ranks(3, PROGRAMS, "bad_files", tmp_path, limit=LIMIT).check().shows("all cases seen")


def test_one_open_per_file_for_the_whole_job(run_ranks, tmp_path):
    run_ranks(4, PROGRAMS, "opens_once", tmp_path, limit=LIMIT).check().shows("one open per file")


def test_a_line_for_every_epoch_and_nobody_is_waited_for(run_ranks, tmp_path):
    run_ranks(3, PROGRAMS, "paces", tmp_path, limit=LIMIT).check().shows("seen")


READ = {
    "truncated_while_read": ("DataFileError", "1.h5", "truncated"),
    "vanished_while_read": ("DataFileError", "1.h5", "cannot be found"),
    "flipped_while_read": ("ChecksumError", "1.h5", "dataset 'x'"),
    "not_finite": ("NotFiniteError", "1.h5', dataset 'x': row 301 has the value nan"),
}


@pytest.mark.parametrize("name", READ)
def test_what_is_found_while_reading_ends_the_job(run_ranks, tmp_path, name):
    ended = run_ranks(3, PROGRAMS, name, tmp_path, limit=LIMIT)
    assert ended.status not in (0, None), str(ended)
    ended.shows(*READ[name], "of 3 failed, which ends the job", "fix: ")


def test_a_killed_rank_leaves_files_as_they_were(run_ranks, tmp_path):
    def contents():
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}

    for number in range(3):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"] = np.ones((600, 2))
    before = contents()
    ended = run_ranks(3, PROGRAMS, "killed", tmp_path, limit=LIMIT)
    assert ended.status not in (0, None), str(ended)
    assert contents() == before
    for path in tmp_path.iterdir():
        with open(path, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with h5py.File(path, "r+") as file:
            file["x"][0] = 2
