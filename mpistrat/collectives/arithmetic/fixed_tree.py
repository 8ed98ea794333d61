"""Sums of the arrays of several ranks or replicas: in their order, or by a fixed tree with equal bits on any ranks.

The sum over ``[a, b)`` is that of its left part, the largest power of two below ``b - a`` replicas, plus that of the
rest. The tree depends on the number of replicas alone. A process adds the largest subtrees whose replicas it has all;
whoever gets these partial sums goes on up the tree.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

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
    """Write the combination of a subtree to ``out``, in its dtype, from those of smaller ones. ``out`` may be one."""
    found = _combined(combine, parts, tree, out.dtype)
    if found is not out:
        out[...] = found


def _combined(combine: np.ufunc, parts: Mapping[range, np.ndarray], tree: range, dtype: np.dtype) -> np.ndarray:
    own = parts.get(tree)
    if own is not None:
        return own
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
    found: dict[range, range] = {}
    for tree in trees:
        if len(tree) > 1:
            found[halves(tree)[1]] = tree
            found |= tree_of_right(halves(tree))
    return found
