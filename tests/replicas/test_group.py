"""Which rank plays which replica."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.collectives.algorithms.tree import halves, subtrees
from mpistrat.replicas import ReplicaGroup


def of(rank, blocks, **options):
    return ReplicaGroup(SimpleNamespace(size=len(blocks), rank=rank), blocks, **options)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_each_rank_plays_the_replica_of_its_number(size):
    for rank in range(size):
        group = ReplicaGroup(SimpleNamespace(size=size, rank=rank))
        assert (group.size, group.first, group.count, group.local) == (size, rank, 1, range(rank, rank + 1))
        assert group.is_chief == (rank == 0)
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
        assert group.local == group.blocks[rank] == blocks[rank]
        assert [*group.local] == [replica for replica in sorted(player) if player[replica] == rank]
        assert all(group.rank_of(replica) == player[replica] for replica in player)
    assert [group.is_chief for group in groups].count(True) == 1


def test_ranks_of_equal_blocks_play_one_replica_together():
    blocks = [range(1), range(1), range(1, 2), range(1, 2)]
    groups = [of(rank, blocks) for rank in range(4)]
    assert [each.first for each in groups] == [0, 0, 1, 1]
    assert [each.is_chief for each in groups] == [True, False, False, False]
    assert all((each.size, each.count) == (2, 1) for each in groups)
    assert groups[0].rank_of(1) == 2


@pytest.mark.parametrize(
    "blocks", [[range(1), range(2, 3)], [range(2), range(1, 3)], [range(1, 2), range(2, 3)], [range(1), range(1, 1)]]
)
def test_blocks_with_gaps_are_refused(blocks):
    with pytest.raises(ValueError, match="without a gap"):
        of(0, blocks)


def test_a_block_for_each_rank():
    with pytest.raises(ValueError, match="1 blocks of replicas for 2 ranks"):
        ReplicaGroup(SimpleNamespace(size=2, rank=0), [range(2)])


@st.composite
def placements(draw):
    """Ranks on nodes in any order, as `Topology.nodes` lists them: nodes by their first rank, ranks by number."""
    node_of = draw(st.lists(st.integers(0, 3), min_size=1, max_size=9))
    return tuple(tuple(rank for rank, node in enumerate(node_of) if node == each) for each in dict.fromkeys(node_of))


def dealt(nodes, size):
    ranks = sum(map(len, nodes))
    return [ReplicaGroup.dealt(SimpleNamespace(size=ranks, rank=rank, nodes=nodes), size) for rank in range(ranks)]


def subtrees_of(tree):
    return {tree} if len(tree) == 1 else {tree}.union(*map(subtrees_of, halves(tree)))


@given(placements(), st.integers(0, 40))
def test_replicas_are_dealt_evenly_and_nodes_get_consecutive_ones(nodes, more):
    ranks = sum(map(len, nodes))
    size = ranks + more
    groups = dealt(nodes, size)
    assert [group.local for group in groups] == [groups[0].blocks[rank] for rank in range(ranks)]
    assert sorted(replica for group in groups for replica in group.local) == [*range(size)]
    assert {group.count for group in groups} <= {size // ranks, -(-size // ranks)}
    for node in nodes:
        on_node = [replica for rank in node for replica in groups[rank].local]
        assert on_node == [*range(on_node[0], on_node[0] + len(on_node))]
    for replica in range(size):
        assert replica in groups[groups[0].rank_of(replica)].local
    assert [group.is_chief for group in groups] == [rank == 0 for rank in range(ranks)]
    assert all(group.is_virtual for group in groups)


@given(placements(), st.integers(0, 40))
def test_a_rank_owns_the_largest_subtrees_of_its_block(nodes, more):
    groups = dealt(nodes, sum(map(len, nodes)) + more)
    trees = subtrees_of(range(groups[0].size))
    parent = {half: tree for tree in trees if len(tree) > 1 for half in halves(tree)}
    for rank, group in enumerate(groups):
        own = [*subtrees(range(group.size), groups[0].blocks[rank])]
        assert [replica for tree in own for replica in tree] == [*group.local]
        assert trees.issuperset(own)
        assert not any({*parent[tree]} <= {*group.local} for tree in own if tree in parent)
        assert len(own) <= 2 * (group.count.bit_length() - 1) + 1


@pytest.mark.parametrize("count", [2, 3, 4, 6, 7, 8, 9])
def test_the_left_half_is_the_largest_power_of_two_below_all(count):
    left, right = halves(range(5, 5 + count))
    assert (left.start, left.stop, right.stop) == (5, right.start, 5 + count)
    assert len(left) & (len(left) - 1) == 0
    assert len(left) < count <= 2 * len(left)


def test_cyclic_ranks_of_a_node_get_consecutive_replicas():
    groups = dealt(((0, 2), (1, 3)), 8)
    assert [group.local for group in groups] == [range(2), range(4, 6), range(2, 4), range(6, 8)]


def test_a_rank_without_a_replica_is_refused():
    with pytest.raises(ValueError, match="3 replicas for 4 ranks"):
        dealt(((0, 1, 2, 3),), 3)
