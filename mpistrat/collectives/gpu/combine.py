"""The combination of the arrays of several ranks on one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.arrays.gpu.kernels import EachElement

_TOGETHER = 8  # rows in one launch: a thread holds some elements of each

_sums: dict[int, EachElement] = {}


def combine_on_gpu(combine: np.ufunc, rows: Sequence[Any], total: Any) -> None:
    """Write ``rows[0] + rows[1] + ...`` to ``total``, in this order; sums take few launches that read each row once.

    Rows are contiguous, of the length and dtype of ``total``, which may be the first row.
    """
    if combine is not np.add:
        if total is not rows[0]:
            total[...] = rows[0]
        for row in rows[1:]:
            combine(total, row, out=total)
        return
    dtype = total.dtype
    if dtype.kind == "c":
        dtype = np.dtype(f"f{dtype.itemsize // 2}")
    elif dtype.kind == "i":
        dtype = np.dtype(f"u{dtype.itemsize}")  # the sum has the same bits
    bits, into = [row.view(dtype) for row in rows], total.view(dtype)
    _sum_of(min(len(rows), _TOGETHER))([[each] for each in (*bits[:_TOGETHER], into)])
    for first in range(_TOGETHER, len(rows), _TOGETHER - 1):
        more = bits[first : first + _TOGETHER - 1]
        _sum_of(1 + len(more))([[each] for each in (into, *more, into)])


def _sum_of(number: int) -> EachElement:
    found = _sums.get(number)
    if found is None:
        names = [f"a{i}" for i in range(number)]
        body = f"total = {' + '.join(names)};"
        found = _sums[number] = EachElement(f"mpistrat_sum_{number}", names, ["total"], [], body)
    return found
