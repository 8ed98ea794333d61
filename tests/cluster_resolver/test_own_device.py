"""The own GPU of each rank, from the GPUs that the ranks of its node see."""

import pytest

from mpistrat.cluster_resolver.gpus import share
from mpistrat.cluster_resolver.own_device import own_index

A, B, C, D = "abcd"


def own_gpus(*seen):
    """Return the GPU of each rank, by name."""
    return "".join(each[own_index(seen, rank)] for rank, each in enumerate(seen))


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([(A, B, C, D)] * 4, "abcd"),  # --gpus-per-node
        ([(A, B, C, D)] * 2, "ac"),
        ([(A, B)] * 4, "aabb"),  # neighbours share
        ([(A, B, C)] * 2, "ab"),
        ([(A,), (B,), (C,), (D,)], "abcd"),  # --gpus-per-task=1, --gpu-bind=single:1
        ([(A, B), (C, D)], "ac"),  # --gpus-per-task=2
        ([(A, B), (A, B), (C, D), (C, D)], "abcd"),  # --gpu-bind=mask_gpu:0x3,0x3,0xc,0xc
        ([(A, B), (C, D), (A, B), (C, D)], "acbd"),  # --gpu-bind=closest, sockets in turn
        ([(A, B), (A, B), (A, B), (C, D)], "aabc"),
        ([(A,), (A,), (B,), (B,)], "aabb"),
        ([(A, B), (B, A)], "ab"),  # the same GPUs in another order
        ([(B, A), (B, A)], "ba"),  # the user's order is kept
        ([(), (A, B), (A, B)], "ab"),
    ],
)
def test_ranks_that_see_the_same_divide_it(seen, expected):
    seeing = [each for each in seen if each]
    assert own_gpus(*seeing) == expected
    if len(seeing) < len(seen):
        assert own_index(seen, 1) == 0
        assert own_index(seen, 2) == 1


def test_gpus_that_nothing_tells_apart():
    """MIG slices may have the UUID of their GPU."""
    assert [own_index([(A, A)] * 2, rank) for rank in range(2)] == [0, 1]


@pytest.mark.parametrize("ranks", range(1, 10))
def test_as_cluster_resolvers_share_them(ranks):
    seen = (A, B, C, D)
    assert [own_index([seen] * ranks, rank) for rank in range(ranks)] == [
        share(seen, rank, ranks).first for rank in range(ranks)
    ]
