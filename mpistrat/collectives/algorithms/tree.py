"""The all-reduce by the fixed tree: the same bits on any number of ranks that play the same replicas.

The sum over ``[a, b)`` is the sum over its left part, the largest power of two below ``b - a`` replicas, plus the sum
over the rest. The tree depends on the number of replicas alone. A process adds the largest subtrees of which it has all
replicas. The rank that gets these partial sums goes on up the tree.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpistrat.collectives.algorithms.contract import WHOLE, Algorithm, Cost
from mpistrat.runtime.topology import Slot, Topology

_BLOCK_BYTES = 128 << 10  # stays in the cache while the next rank's values are added


def combine_rows(combine: np.ufunc, rows: Sequence[np.ndarray], out: np.ndarray) -> None:
    """Write ``rows[0] + rows[1] + ...`` to ``out``, in this order and in the dtype of ``out``, which may be a row."""
    if len(rows) == 2:
        combine(rows[0], rows[1], out=out, dtype=out.dtype)
        return
    if len(rows) == 1:
        if rows[0] is not out:
            out[...] = rows[0]
        return
    step = max(1, _BLOCK_BYTES // out.itemsize)
    if out.size <= step:
        total = combine(rows[0], rows[1], dtype=out.dtype)
        for row in rows[2:]:
            combine(total, row, out=total, dtype=out.dtype)
        out[...] = total
        return
    for start in range(0, len(out), step):
        block = slice(start, start + step)
        total = combine(rows[0][block], rows[1][block], dtype=out.dtype)
        for row in rows[2:]:
            combine(total, row[block], out=total, dtype=out.dtype)
        out[block] = total


def halves(replicas: range) -> tuple[range, range]:
    """Return the two parts of a subtree of at least two replicas.

    >>> halves(range(6))
    (range(0, 4), range(4, 6))
    """
    middle = replicas.start + (1 << (len(replicas) - 1).bit_length() - 1)
    return range(replicas.start, middle), range(middle, replicas.stop)


def subtrees(tree: range, owned: Collection[int]) -> Iterator[range]:
    """Yield the largest subtrees whose replicas are all among ``owned``, in order.

    >>> [*subtrees(range(8), range(3, 8))]
    [range(3, 4), range(4, 8)]
    """
    among = [replica in owned for replica in tree]
    if all(among):
        yield tree
    elif any(among):
        for half in halves(tree):
            yield from subtrees(half, owned)


def combine_tree(combine: np.ufunc, parts: Mapping[range, np.ndarray], tree: range, out: np.ndarray) -> None:
    """Combine the subtrees in ``parts`` to ``tree``, and write it to ``out``, in its dtype. ``out`` may be a part."""
    total = _combined(combine, parts, tree, out.dtype)
    if total is not out:
        out[...] = total


def _combined(combine: np.ufunc, parts: Mapping[range, np.ndarray], tree: range, dtype: np.dtype) -> np.ndarray:
    values = parts.get(tree)
    if values is not None:
        return values
    pair = halves(tree)
    first, second = (_combined(combine, parts, half, dtype) for half in pair)
    if pair[0] not in parts:
        return combine(first, second, out=first, dtype=dtype)  # made here, so that it may be overwritten
    return combine(first, second, dtype=dtype)


def tree_of_right(trees: Iterable[range]) -> dict[range, range]:
    """Return the subtree of each right half inside some subtrees: what is complete when that half is.

    >>> tree_of_right([range(4)])
    {range(2, 4): range(0, 4), range(1, 2): range(0, 2), range(3, 4): range(2, 4)}
    """
    parents: dict[range, range] = {}
    for tree in trees:
        if len(tree) > 1:
            parents[halves(tree)[1]] = tree
            parents |= tree_of_right(halves(tree))
    return parents


# --- between ranks --------------------------------------------------------------


_PIECE_BYTES = 4 << 20
_ALL_BY_EACH_BYTES = 128 << 10  # of all ranks together; below it each rank goes up the tree itself


class Shares:
    """The partial sums of the fixed tree of each rank and node. ``blocks`` are the replicas of each rank."""

    def __init__(self, topology: Topology, blocks: Sequence[range]):
        nodes, self.blocks = topology.nodes, blocks
        self.tree = tree = range(len({*itertools.chain(*blocks)}))
        self.of_rank = [[*subtrees(tree, block)] for block in blocks]
        of_node = [[*subtrees(tree, {*itertools.chain(*(blocks[rank] for rank in node))})] for node in nodes]
        self.of_own_node = next(trees for node, trees in zip(nodes, of_node, strict=True) if topology.rank in node)
        self._nodes, self._of_node = nodes, of_node
        self.most = max(map(len, self.of_rank))
        self.on_node = next([self.of_rank[rank] for rank in node] for node in nodes if topology.rank in node)

    def on_rail(self, rail: int) -> list[list[range]]:
        """Return the largest subtrees of the nodes, in the order of their ranks on a rail."""
        order = sorted(range(len(self._nodes)), key=lambda node: self._nodes[node][rail])
        return [self._of_node[node] for node in order]


def reduce_by_tree(
    topology: Topology, shares: Shares, combine: np.ufunc, rows: Sequence[np.ndarray], receive: np.ndarray
) -> None:
    """Write the combination of all replicas to ``receive``, in its dtype. The caller holds the collective lock.

    ``rows`` are this rank's partial sums, flat, in the order of ``shares.of_rank``; one may be ``receive``. Where ranks
    share memory, the first communication is `CollectiveLock.meet`.
    """
    memory, dtype, length = topology.memory, receive.dtype, len(receive)
    if topology.size == 1:
        receive[...] = rows[0]
        return
    if memory is None:
        step = max(1, _PIECE_BYTES // dtype.itemsize)
        for start in range(0, length, step):
            part = slice(start, start + step)
            chunks = [row[part] for row in rows]
            _by_slices(topology.world, shares.of_rank, shares.tree, combine, chunks, receive[part])
        return
    one_node = len(topology.nodes) == 1
    slices = memory.size if one_node else min(topology.ranks_per_node)
    step = max(1, memory.slot_bytes // (dtype.itemsize * shares.most))
    for start in range(0, length, step):
        piece = receive[start : start + step]
        count = len(piece)
        own_slot, slots = memory.slots(dtype, count * shares.most)
        for i, row in enumerate(rows):
            own_slot[i * count : (i + 1) * count] = row[start : start + step]
        topology.lock.meet()
        in_slots = [
            (tree, slot[i * count : (i + 1) * count])
            for slot, trees in zip(slots, shares.on_node, strict=True)
            for i, tree in enumerate(trees)
        ]
        if one_node and piece.nbytes * len(in_slots) <= _ALL_BY_EACH_BYTES:
            # No second meeting: the next piece lies in the other generation of the slots, and before the one after that
            # all ranks have met again.
            combine_tree(combine, dict(in_slots), shares.tree, piece)
            continue
        # Ranks beyond the smallest node have no partner on a rail: they only wait for the result.
        result = memory.total(dtype, count)
        if memory.rank < slices:
            part = slice(count * memory.rank // slices, count * (memory.rank + 1) // slices)
            parts = {tree: row[part] for tree, row in in_slots}
            if one_node:
                combine_tree(combine, parts, shares.tree, result[part])
            else:
                _between_nodes(topology, shares, combine, parts, result[part])
        topology.lock.meet()
        piece[...] = result


def _between_nodes(
    topology: Topology, shares: Shares, combine: np.ufunc, parts: dict[range, np.ndarray], out: np.ndarray
) -> None:
    memory = topology.node_memory
    sums = [np.empty_like(out) for _ in shares.of_own_node]
    for tree, row in zip(shares.of_own_node, sums, strict=True):
        combine_tree(combine, parts, tree, row)
    _by_slices(topology.rail, shares.on_rail(memory.rank), shares.tree, combine, sums, out)


def _by_slices(
    comm: Any,
    owned: Sequence[Sequence[range]],
    tree: range,
    combine: np.ufunc,
    rows: Sequence[np.ndarray],
    out: np.ndarray,
) -> None:
    def up_the_tree(received: list[np.ndarray], part: np.ndarray) -> None:
        combine_tree(combine, dict(zip(itertools.chain(*owned), received, strict=True)), tree, part)

    combine_by_slices(comm, rows, [len(trees) for trees in owned], out, up_the_tree)


def combine_by_slices(
    comm: Any,
    rows: Sequence[np.ndarray],
    counts: Sequence[int],
    out: np.ndarray,
    combine: Callable[[list[np.ndarray], np.ndarray], None],
) -> None:
    """Send each member a slice of all ``counts[member]`` rows of each, which it combines, and gather the slices.

    A member with one row sends and receives ``2 (size - 1) / size`` times the bytes of the array.
    """
    size, rank, dtype = comm.size, comm.rank, rows[0].dtype
    ends = [len(out) * i // size for i in range(size + 1)]
    lengths = np.diff(ends)
    length = int(lengths[rank])
    send = np.concatenate([row[a:b] for a, b in itertools.pairwise(ends) for row in rows])
    received = np.empty((sum(counts), length), dtype)
    # As bytes: MPI has no datatype for float16, and mpi4py refuses bfloat16.
    comm.Alltoallv(
        [send.view(np.uint8), lengths * (len(rows) * dtype.itemsize)],
        [received.reshape(-1).view(np.uint8), np.multiply(counts, length * dtype.itemsize)],
    )
    total = np.empty(length, out.dtype)
    combine([*received], total)
    comm.Allgatherv(total.view(np.uint8), [out.view(np.uint8), lengths * out.dtype.itemsize])


class _RankShares(Slot):
    shares: Shares | None = None


def shares_of_ranks(topology: Topology) -> Shares:
    """Return the shares of ranks that play one replica each, numbered in the order of nodes."""
    slot = topology.slot(_RankShares)
    if slot.shares is None:
        index = {rank: i for i, rank in enumerate(itertools.chain(*topology.nodes))}
        blocks = [range(index[rank], index[rank] + 1) for rank in range(topology.size)]
        slot.shares = Shares(topology, blocks)
    return slot.shares


class TreeAllReduce(Algorithm):
    """The all-reduce that adds by the fixed tree over the ranks, in the order of nodes.

    Between nodes a rail exchanges slices of the nodes' partial sums: one for each node whose ranks are a subtree, else
    up to ``2 log2(ranks of a node)``.
    """

    name = "tree"
    by_name_only = True

    def cost(self, topology: Topology) -> Cost:
        return Cost(2e-6 * topology.size, 2 / 1e9)

    def piece_bytes(self, topology: Topology) -> int:
        return WHOLE

    def reduce(self, topology: Topology, combine: np.ufunc, send: np.ndarray, receive: np.ndarray) -> None:
        topology.lock.is_shared_memory_only = topology.shares_all
        reduce_by_tree(topology, shares_of_ranks(topology), combine, [send], receive)
