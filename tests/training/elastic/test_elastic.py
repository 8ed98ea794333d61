"""Programs that lose ranks at any moment: they end with the bits of a run without a loss."""

import json
import os
import re

import pytest

from tests.training.elastic.conftest import PROGRAM, nothing_left, result

pytestmark = pytest.mark.fault


@pytest.mark.parametrize(("how", "status"), [("raise", 1), ("exit", 3), ("terminate", 143)])
def test_what_is_no_loss_ends_the_job(run, how, status):
    ended = run(2, [("step:4", [1], how)], "--elastic")
    assert ended.status == status, str(ended)
    assert "goes on" not in ended.output


def test_a_hang_that_the_watchdog_ends_is_a_loss(run, undisturbed):
    ended = run(2, [("step:4", [1], "hang")], "--elastic", MPISTRAT_HANG_SECONDS="1", MPISTRAT_HANG_ABORT_SECONDS="2")
    assert result(ended) == undisturbed
    ended.shows("goes on after a hang with 2 ranks, from the copy of step 4")


def test_three_losses_at_one_step_are_taken_for_the_fault_of_the_program(run):
    ended = run(2, [("step:4", [0], "kill")] * 4, "--elastic")
    assert ended.status == 137
    assert re.search("gives up after the loss of (a rank|rank 0): 3 losses, 3 of them at step 4", ended.output)
    ended = run(2, [("step:4", [0], "kill")] * 4, "--elastic", "--restarts", "1")
    assert re.search("gives up after the loss of (a rank|rank 0): 2 losses", ended.output)


SIGNALLED = """
import os, signal
from mpistrat.cli import main
from mpistrat.training import elastic_copies as copies

newest = copies.newest_steps

def signalled(folder):
    os.kill(os.getpid(), signal.SIGTERM)
    return newest(folder)

copies.newest_steps = signalled
main()
"""


def test_a_signal_between_two_runs_ends_the_next_one(run_alone, tmp_path):
    before = {*os.listdir("/dev/shm")}
    (tmp_path / "main.py").write_text(SIGNALLED)
    losses = json.dumps([["step:4", [1], "kill"], ["built", [0, 1], "hang"]])
    ended = run_alone(tmp_path / "main.py", "run", "-n", "2", "--elastic", PROGRAM, tmp_path, losses)
    assert ended.status == 143, ended
    nothing_left(tmp_path, before)


def test_fewer_ranks_need_virtual_replicas(run):
    ended = run(2, [("nowhere", [], "no replicas")], "--elastic", "fewer")
    assert ended.status == 1
    ended.shows("after a loss the program may run on fewer ranks", "the strategy has no virtual_replicas")


def test_a_copy_with_a_flipped_bit_is_not_used(run, undisturbed):
    """The one before is, which is whole."""
    ended = run(2, [("flip:9", [0], "kill")], "--elastic")
    assert result(ended) == undisturbed
    ended.shows("the copy of step 9 in", "is not used: the checksum of", "from the copy of step 9")


def test_without_room_for_copies_files_are_enough(run, undisturbed):
    ended = run(2, [("step:4", [1], "kill")], "--elastic", MPISTRAT_ELASTIC_MEMORY="100")
    assert result(ended) == undisturbed
    ended.shows("the state is not copied to the memory of nodes, only saved in files", "from the newest checkpoint")


def test_a_handler_of_preemption_goes_on_too(run, undisturbed):
    ended = run(2, [("step:4", [1], "kill"), ("step:15", [0], "kill")], "--elastic", WAY="handler")
    assert result(ended) == undisturbed
    assert ended.output.count("from the copy of step") == 2
