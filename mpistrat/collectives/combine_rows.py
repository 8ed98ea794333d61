"""Arrays of several ranks, combined by one of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_BLOCK_BYTES = 128 << 10  # stays in the cache while the next rank's values are added


def combine_rows(combine: np.ufunc, rows: Sequence[np.ndarray], out: np.ndarray) -> None:
    """``rows[0] + rows[1] + ...`` in this order, in the dtype of ``out``, which may be one of the rows.

    Parameters
    ----------
    combine : numpy.ufunc
    rows : sequence of numpy.ndarray, shape (count,)
    out : numpy.ndarray, shape (count,)
    """
    if len(rows) == 2:
        combine(rows[0], rows[1], out=out, dtype=out.dtype)
        return
    if len(rows) == 1:
        if rows[0] is not out:
            out[...] = rows[0]
        return
    step = max(1, _BLOCK_BYTES // out.itemsize)
    for start in range(0, len(out), step):
        block = slice(start, start + step)
        total = combine(rows[0][block], rows[1][block], dtype=out.dtype)
        for row in rows[2:]:
            combine(total, row[block], out=total, dtype=out.dtype)
        out[block] = total
