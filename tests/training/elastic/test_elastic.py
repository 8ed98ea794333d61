"""Programs that lose ranks at any moment: they end with the bits of a run without a loss."""

import os
import re

import numpy as np
import pytest

from tests.training.elastic.conftest import result

pytestmark = pytest.mark.fault
PLACES = ("start", "built", "restored", "step:{}", "end:{}", "copy:{}", "after")
STEPS = 18


def random_losses(seed):
    rng = np.random.default_rng(seed)
    ranks, losses = int(rng.integers(1, 5)), []
    for _ in range(int(rng.integers(1, 3))):  # three at one step would be the program's fault
        place = str(rng.choice(PLACES)).format(rng.integers(1, STEPS + 1))
        victims = "all" if rng.random() < 0.25 else sorted({*rng.integers(0, ranks, int(rng.integers(1, 3))).tolist()})
        losses.append((place, victims, str(rng.choice(["kill", "kill", "crash"]))))
    return ranks, losses, str(rng.choice(["same", "fewer"]))


few, many = range(2), range(2, int(os.environ.get("MPISTRAT_TEST_LOSSES", "4")))


@pytest.mark.mpich
@pytest.mark.parametrize("seed", [*few, *(pytest.param(seed, marks=pytest.mark.full) for seed in many)])
def test_the_bits_of_a_run_without_a_loss(run, seed, undisturbed):
    ranks, losses, mode = random_losses(seed)
    assert result(run(ranks, losses, "--elastic", mode)) == undisturbed, (ranks, losses, mode)


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
