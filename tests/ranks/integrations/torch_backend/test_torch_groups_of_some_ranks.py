"""Groups of some of the ranks: by new_group, split_group and a device; and ranks that make different ones."""

import contextlib
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from mpi4py import MPI  # noqa: E402

from mpistrat.record import flight_record, read  # noqa: E402
from mpistrat.runtime.agreement.operation import MismatchError  # noqa: E402

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
HALVES = [list(range(SIZE // 2)), list(range(SIZE // 2, SIZE))] if SIZE > 1 else [[0]]
LAST = SIZE - 1
TORCH = tuple(int(each) for each in torch.__version__.split(".")[:2])
OF_ACCELERATORS = TORCH < (2, 15)  # older ones refuse all backends but Gloo, or need an accelerator
pytestmark = pytest.mark.usefixtures("default_group_anew")
several = pytest.mark.skipif(SIZE == 1, reason="needs several ranks")


def sum_of_ranks(group=None):
    tensor = torch.tensor([float(RANK)])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


# --- ranks that make different groups ------------------------------------------------------------------


@several
def test_ranks_that_make_other_groups_raise():
    """Each rank leaves out another one."""
    ranks = [rank for rank in range(SIZE) if SIZE == 2 or rank != (RANK + 1) % SIZE]
    ranks = ranks[::-1] if SIZE == 2 and RANK else ranks
    with pytest.raises(MismatchError, match=r"new group of ranks .* makes one of ranks"):
        dist.new_group(ranks, **({"sort_ranks": False} if SIZE == 2 else {}))
    assert sum_of_ranks() == sum(range(SIZE))


@pytest.mark.skipif(SIZE < 3, reason="needs a rank that the others leave out")
def test_a_rank_that_makes_a_larger_group_raises():
    if RANK == LAST:
        with pytest.raises(MismatchError, match=r"new group of ranks .* makes one of ranks"):
            dist.new_group(list(range(SIZE)))
    else:  # they agree with each other
        group = dist.new_group(list(range(LAST)))
        assert sum_of_ranks(group) == sum(range(LAST))
        dist.destroy_process_group(group)
    assert sum_of_ranks() == sum(range(SIZE))


@several
def test_members_that_do_not_come_are_named():
    ranks = [0, 1] if RANK == 0 else [RANK]
    with contextlib.ExitStack() as stack:
        if RANK == 0:
            stack.enter_context(pytest.raises(RuntimeError, match=r"rank 1 did not make it within 0.2 s"))
        dist.new_group(ranks, timeout=timedelta(seconds=0.2), use_local_synchronization=True)
    MPI.COMM_WORLD.Barrier()
    if RANK == 1:  # too late for the first attempt
        with pytest.raises(RuntimeError, match="failed on rank 0"):
            dist.new_group([0, 1], use_local_synchronization=True)
    if RANK <= 1:
        assert sum_of_ranks(dist.new_group([0, 1], use_local_synchronization=True)) == 1
    assert sum_of_ranks() == sum(range(SIZE))


@pytest.mark.skipif(SIZE < 3, reason="needs several members beside the one that differs")
def test_no_member_is_left_alone_if_one_has_another_list():
    ranks = list(range(1 if RANK == LAST else 0, SIZE))
    with pytest.raises(MismatchError, match=r"new group of ranks .* makes one of ranks"):
        dist.new_group(ranks)
    MPI.COMM_WORLD.Barrier()  # a rank that makes it again now would end the attempts of others, with another error
    assert sum_of_ranks(dist.new_group(list(range(SIZE)))) == sum(range(SIZE))


@pytest.mark.skipif(SIZE < 3, reason="needs several members beside the one that does not come")
@pytest.mark.parametrize("late", [0, LAST])
def test_all_members_that_came_raise_if_one_does_not_come(late):
    limit = {"timeout": timedelta(seconds=2), "use_local_synchronization": True}
    MPI.COMM_WORLD.Barrier()  # one that comes late, too, would be named instead
    if late != RANK:
        with pytest.raises(RuntimeError, match=rf"rank {late} did not make it within 2 s"):
            dist.new_group(list(range(SIZE)), **limit)
    else:
        dist.new_group([late], **limit)
    MPI.COMM_WORLD.Barrier()
    assert sum_of_ranks(dist.new_group(list(range(SIZE)))) == sum(range(SIZE))


# --- split_group ---------------------------------------------------------------------------------------


def test_split_by_torch():
    if OF_ACCELERATORS:
        with pytest.raises(RuntimeError, match=r"No device associated|not support split"):
            dist.split_group(split_ranks=HALVES)
        return
    part = dist.split_group(split_ranks=HALVES, group_desc="half")
    assert part.group_desc == "half"
    assert sum_of_ranks(part) == sum(HALVES[RANK in HALVES[-1] and SIZE > 1])
    dist.destroy_process_group(part)
    first = dist.split_group(split_ranks=[[0]])  # the other ranks have none
    assert (RANK == 0) == (first is not dist.GroupMember.NON_GROUP_MEMBER)
    assert sum_of_ranks() == sum(range(SIZE))


def test_split_of_the_group_itself():
    group = dist.group.WORLD
    mine = HALVES[RANK in HALVES[-1] and SIZE > 1]
    part = group.split_group(mine[::-1], group_name="part", group_desc="back to front")
    assert (part.rank(), part.size()) == (mine[::-1].index(RANK), len(mine))
    assert (part.group_name, part.group_desc) == ("part", "back to front")
    tensor = torch.tensor([float(RANK)])
    part.allreduce([tensor]).wait()
    assert tensor.item() == sum(mine)
    last = part.split_group([len(mine) - 1])  # of a part
    assert (last is None) == (part.rank() != len(mine) - 1)
    if last is not None:
        last.shutdown()
    part.shutdown()


@several
def test_parts_that_overlap_raise_everywhere():
    part = [0, 1] if RANK == 0 else [1]
    with pytest.raises(MismatchError, match=r"rank 0 makes a part of ranks \[0, 1\], and rank 1 another"):
        dist.group.WORLD.split_group(part)
    with pytest.raises((ValueError, MismatchError), match=rf"split_group.*\[{SIZE}\] of {SIZE} ranks"):
        dist.group.WORLD.split_group([SIZE] if RANK == 0 else [1])
    assert sum_of_ranks() == sum(range(SIZE))


# --- what else torch leaves to some backends -----------------------------------------------------------


def test_monitored_barrier_by_torch():
    if OF_ACCELERATORS:
        with pytest.raises(ValueError, match="only implemented for GLOO"):
            dist.monitored_barrier()
    else:
        dist.monitored_barrier(timeout=timedelta(seconds=60))
    assert sum_of_ranks() == sum(range(SIZE))


# --- the flight record ---------------------------------------------------------------------------------


def test_the_record_names_the_line_of_the_program_not_of_torch():
    sum_of_ranks()
    if SIZE > 1:
        (entry,) = read.parse(flight_record.current().contents()).entries[-1:]
        assert __file__ in entry.place
        assert entry.place.endswith(" in sum_of_ranks")
