"""Cores and threads, and the warning about ranks that share one core."""

import os
import re

import pytest
import threadpoolctl

from mpistrat.representation import ranges
from mpistrat.runtime import affinity

PROGRAM = """
import os, warnings
warnings.simplefilter("always")
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import mpistrat
for _ in range(2):
    mpistrat.MultiWorkerMirroredStrategy()
"""


def test_ranges():
    assert ranges([]) == ""
    assert ranges({7}) == "7"
    assert ranges({9, 1, 2, 3, 5}) == "1-3,5,9"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"OMP_NUM_THREADS": "3"}, (3, "OMP_NUM_THREADS")),
        ({"OMP_NUM_THREADS": "4,2", "MKL_NUM_THREADS": ""}, (4, "OMP_NUM_THREADS")),
        ({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "8"}, (8, "OPENBLAS_NUM_THREADS")),
        ({"OMP_NUM_THREADS": "many"}, None),
    ],
)
def test_threads(environ, expected):
    assert affinity.threads(environ) == expected


@pytest.mark.parametrize(
    ("masks", "there", "expected"),
    [
        ([{0}, {0}, {0}], 4, True),
        ([{0}, {1}], 4, False),
        ([{0, 1}, {0, 1}], 4, False),
        ([{0}], 4, False),
        ([{0}, {0}], 1, False),
    ],
)
def test_one_core(masks, there, expected):
    assert affinity.share_one_core([frozenset(mask) for mask in masks], there) is expected


@pytest.mark.parametrize(
    ("masks", "threads", "expected"),
    [
        ([{0, 1}, {0, 1}], [2, 2], True),
        ([{0, 1}, {0, 1}], [1, 2], True),
        ([{0, 1}, {2, 3}], [2, 2], False),
        ([{0, 1}, {0, 1}, {0, 1}], [1, 1, 1], False),
        ([{0, 1}], [4], False),
    ],
)
def test_threads_that_fight(masks, threads, expected):
    assert affinity.fight_for_cores([frozenset(mask) for mask in masks], threads) is expected


@pytest.mark.skipif(affinity.cores_of_machine() < 2, reason="this machine has one core")
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no processes")
def test_warning_comes_once_per_job(run_ranks, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ended = run_ranks(3, program, OMP_NUM_THREADS="2").check()
    assert ended.output.count("all 3 ranks of this node share core") == 1, str(ended)
    ended.shows("each with 2 thread(s)", "--cpus-per-task", "program.py:7: RuntimeWarning")


FIGHTING = """
import mpistrat
for _ in range(2):
    mpistrat.MultiWorkerMirroredStrategy()
"""


@pytest.mark.parametrize(("threads", "told"), [("512", 1), ("1", 0)])
def test_threads_that_fight_are_told_once_per_job(run_ranks, tmp_path, threads, told):
    program = tmp_path / "program.py"
    program.write_text(FIGHTING)
    ended = run_ranks(2, program, OMP_NUM_THREADS=threads, OPENBLAS_NUM_THREADS="1").check()
    assert ended.output.count("start up to 1024 threads of NumPy's BLAS") == told, str(ended)
    if told:
        ended.shows("set OMP_NUM_THREADS=", "program.py:4: RuntimeWarning")


def test_the_blas_and_its_threads():
    found = affinity.blas()  # NumPy is loaded
    assert all(re.fullmatch(r"\w+ \S+ \S*, \d+ thread\(s\)", each) for each in found.split("; ") if each)
    with threadpoolctl.threadpool_limits(1):
        assert "2 thread(s)" not in affinity.blas()
