"""Programs that catch an error of new_group and call it again, while other ranks are still in their first call."""

import time
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from mpi4py import MPI  # noqa: E402

from mpistrat.runtime.agreement.operation import MismatchError  # noqa: E402

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
LAST = SIZE - 1
ALL = list(range(SIZE))
pytestmark = pytest.mark.usefixtures("default_group_anew")
several = pytest.mark.skipif(SIZE == 1, reason="needs several ranks")


def made(**how):
    """Make a group of all ranks as a careful program does, and return it with the errors on the way."""
    errors = []
    while len(errors) < 5:
        try:
            return dist.new_group(ALL, **how), errors
        except RuntimeError as error:
            errors.append(str(error))
    raise AssertionError(errors)


def check(group):
    """All ranks are in the same group, and in step."""
    for each in (group, None):
        tensor = torch.tensor([float(RANK)])
        dist.all_reduce(tensor, group=each)
        assert tensor.item() == sum(ALL)


@several
@pytest.mark.parametrize("by_members", [False, True])
@pytest.mark.parametrize("late", sorted({0, 1, LAST}))
def test_a_late_member_fails_its_first_attempt_as_the_others_did(late, by_members):
    how = {"use_local_synchronization": by_members}
    others = [rank for rank in ALL if rank != late]
    if late == RANK:
        for rank in others:
            WORLD.recv(source=rank)
        group, errors = made(**how)
        assert len(errors) == 1
        assert "at it, which failed on rank" in errors[0]
    else:
        with pytest.raises(RuntimeError, match=r"did not make it within 0\.1 s|failed on rank"):
            dist.new_group(ALL, timeout=timedelta(seconds=0.1), **how)
        WORLD.send(None, late)
        group, errors = made(**how)
        assert errors == []
    check(group)


@several
def test_a_member_that_failed_twice_is_met_at_its_third_attempt():
    if RANK == LAST:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"did not make it within 0\.1 s"):
                dist.new_group(ALL, timeout=timedelta(seconds=0.1))
        WORLD.send(None, 0)
    elif RANK == 0:
        WORLD.recv(source=LAST)
    group, errors = made()
    assert len(errors) == (RANK != LAST)
    assert all("failed on rank" in error for error in errors)
    check(group)


@pytest.mark.skipif(SIZE < 3, reason="needs several members beside the one that differs")
def test_a_member_that_gave_other_ranks_and_corrects_itself_at_once():
    if RANK == LAST:
        with pytest.raises(MismatchError, match=r"makes one of ranks"):
            dist.new_group(ALL[1:])
    group, errors = made()
    assert len(errors) == (RANK != LAST)
    assert all("makes one of ranks" in error or "failed on rank" in error for error in errors)
    check(group)


@pytest.mark.skipif(SIZE < 3, reason="needs ranks that make three groups of two")
def test_a_group_that_one_rank_had_made_by_mistake():
    with pytest.raises(MismatchError, match=r"makes one of ranks"):
        dist.new_group(sorted({RANK, (RANK + 1) % SIZE}))
    WORLD.Barrier()
    for ranks in ([0, 1], [0, LAST], ALL):
        group = dist.new_group(ranks)
        if RANK in ranks:
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == len(ranks)


@several
@pytest.mark.parametrize("wrong", [0, LAST])
def test_wrong_options_of_one_member_raise_on_all(wrong):
    with pytest.raises((TypeError, MismatchError), match="CommunicationOptions"):
        dist.new_group(ALL, pg_options="exact" if wrong == RANK else None)
    group, errors = made()
    assert errors == []
    check(group)


@several
def test_a_default_group_made_again_counts_anew():
    if RANK == 0:
        with pytest.raises(RuntimeError, match=r"did not make it within 0\.1 s"):
            dist.new_group(ALL, timeout=timedelta(seconds=0.1))
    dist.destroy_process_group()
    dist.init_process_group("mpistrat")
    group, errors = made()
    assert errors == []
    check(group)


@pytest.mark.skipif(SIZE < 3, reason="needs a rank outside of the group")
def test_a_rank_outside_of_a_repeated_attempt_is_in_step():
    inside = ALL[:LAST]
    if RANK == 1:
        WORLD.recv(source=0)
    if RANK == 0:
        with pytest.raises(RuntimeError, match=r"did not make it within 0\.1 s"):
            dist.new_group(inside, timeout=timedelta(seconds=0.1))
        WORLD.send(None, 1)
    errors = 0
    while True:
        try:
            dist.new_group(inside)
            break
        except RuntimeError:
            errors += 1
    assert errors == (RANK in inside[1:])
    if RANK == 0:  # later than the others look for members with other ranks
        time.sleep(0.7)
    group, errors = made()
    assert errors == []
    check(group)
