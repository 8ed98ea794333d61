"""Places among very many ranks."""

import pytest

from mpistrat.cluster_resolver import ClusterSpec, Placement, SimpleClusterResolver
from mpistrat.cluster_resolver.compare import facts_of

NODES, EACH = 20_000, 4


@pytest.mark.timeout(30)
def test_ranks_by_node_of_a_large_job():
    """In a time that grows with the ranks, and not with ranks times nodes, which would be half an hour."""
    where = tuple(rank % NODES for rank in range(NODES * EACH))
    by_node = Placement("srun", len(where), 0, node_of_rank=where).ranks_by_node
    assert len(by_node) == NODES
    assert by_node[5] == (5, NODES + 5, 2 * NODES + 5, 3 * NODES + 5)


@pytest.mark.timeout(30)
def test_place_in_a_large_cluster():
    cluster = ClusterSpec({"worker": [f"n{rank % NODES}:{rank // NODES}" for rank in range(NODES * EACH)]})
    placement = SimpleClusterResolver(cluster, task_type="worker", task_id=NODES + 7).placement
    assert (placement.node, placement.local_rank, placement.local_size) == (7, 1, EACH)
    assert facts_of(placement)["size"].value == NODES * EACH
