"""The combination of the arrays of several ranks by one rank."""

from __future__ import annotations

from collections.abc import Sequence

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
