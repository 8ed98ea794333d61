"""Which rank plays which replica."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.replicas import ReplicaGroup


def of(rank, blocks, **options):
    return ReplicaGroup(SimpleNamespace(size=len(blocks), rank=rank), blocks, **options)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_each_rank_plays_the_replica_of_its_number(size):
    for rank in range(size):
        group = ReplicaGroup(SimpleNamespace(size=size, rank=rank))
        assert (group.size, group.first, group.count, group.local) == (size, rank, 1, range(rank, rank + 1))
        assert (group.is_chief, group.generation) == (rank == 0, 0)
        assert [group.rank_of(replica) for replica in range(size)] == [*range(size)]
        assert repr(group) == f"<ReplicaGroup: {rank} of {size} replicas>"


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_blocks_are_dealt_in_any_order_of_ranks(lengths, random):
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    blocks = [range(start, start + n) for start, n in zip(starts, lengths, strict=True)]
    random.shuffle(blocks)
    groups = [of(rank, blocks) for rank in range(len(blocks))]
    player = {replica: rank for rank, block in enumerate(blocks) for replica in block}
    for rank, group in enumerate(groups):
        assert group.size == len(player)
        assert group.local == group.block_of(rank) == blocks[rank]
        assert [*group.local] == [replica for replica in sorted(player) if player[replica] == rank]
        assert all(group.group(replica) == (player[replica],) for replica in player)
    assert [group.is_chief for group in groups].count(True) == 1


def test_ranks_of_equal_blocks_play_one_replica_together():
    blocks = [range(1), range(1), range(1, 2), range(1, 2)]
    groups = [of(rank, blocks, generation=2) for rank in range(4)]
    assert [each.first for each in groups] == [0, 0, 1, 1]
    assert [each.is_chief for each in groups] == [True, False, False, False]
    assert all((each.size, each.count, each.generation) == (2, 1, 2) for each in groups)
    assert groups[0].group(1) == (2, 3)
    assert groups[0].rank_of(1) == 2


@pytest.mark.parametrize(
    "blocks",
    [[range(1), range(2, 3)], [range(2), range(1, 3)], [range(1, 2), range(2, 3)], [range(1), range(1, 1)]],
)
def test_blocks_with_gaps_are_refused(blocks):
    with pytest.raises(ValueError, match="without a gap"):
        of(0, blocks)


def test_a_block_for_each_rank():
    with pytest.raises(ValueError, match="1 blocks of replicas for 2 ranks"):
        ReplicaGroup(SimpleNamespace(size=2, rank=0), [range(2)])
