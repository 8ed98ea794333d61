"""Programs on torch that go wrong, or leave something at their end."""

import importlib.util
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.fault,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]

PROGRAMS = Path(__file__).with_name("torch_programs.py")


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("killed", ["signal 9"]),
        ("ends", ["the end of the program"]),
        ("receives_from_ended", ["from any rank", "came [1.0, 1.0, 1.0]", "rank 1", "has ended its program"]),
        (
            "asks_the_store_of_ended",
            ["came b'words'", "keys ['never set'] were not set before", "ended their programs: [1]"],
        ),
        ("counts_after_the_first", ["did not answer add('count') before", "ended their programs: [0]"]),
        ("late", ["TimedOutError", "rank 1 of 2 did not come within 3 s"]),
    ],
)
def test_jobs_that_go_wrong_end(name, texts, run_ranks):
    ended = run_ranks(2, PROGRAMS, name, limit=90)
    assert ended.status not in (0, None), str(ended)
    ended.shows(*texts)


def test_a_wait_in_torch_outside_of_collectives_is_reported(run_ranks):
    ended = run_ranks(2, PROGRAMS, "waits_in_torch", MPISTRAT_HANG_SECONDS="1").check()
    ended.shows("rank 0: has waited outside of a collective for", "rank 1: has waited outside", "in wait_all", "lock")
    assert ended.output.count("has waited outside of a collective") == 2


def test_processes_that_a_rank_makes_are_refused(run_ranks):
    ended = run_ranks(1, PROGRAMS, "spawns", limit=90)
    assert ended.status not in (0, None), str(ended)
    ended.shows("MPI does not know this process", "instead of mp.spawn")


def test_what_is_left_at_the_end_does_not_keep_the_job(run_ranks):
    ended = run_ranks(2, PROGRAMS, "leaves_everything", limit=90).check()
    assert ended.output.count("at the end") == 2


PROGRAM_WITHOUT_GUARD = """
import multiprocessing
import torch.distributed as dist
import mpistrat.integrations.torch

dist.init_process_group("mpistrat")
worker = multiprocessing.get_context("spawn").Process(target=print)
worker.start()
worker.join()
print("the worker ended with", worker.exitcode)
"""


def test_workers_that_import_the_program_again_are_refused(run_ranks, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM_WITHOUT_GUARD)
    ended = run_ranks(1, program, limit=90).check()
    ended.shows("begin groups below", "the worker ended with 1")
