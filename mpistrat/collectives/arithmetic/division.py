"""The division of a sum by a count, and the end of a reduction: the mean, rounded to the dtype of the result."""

from __future__ import annotations

from typing import Any

import numpy as np


def divide(total: Any, count: Any, out: Any = None) -> Any:
    """Return ``total / count`` for a count of replicas or examples; written to ``out`` if given, also ``total``.

    The parts of complex numbers are divided one by one: a product of complex numbers makes ``(inf + 2j) / 1`` a nan.

    >>> divide(np.array([complex(np.inf, 2)]), 2)
    array([inf+1.j])
    """
    kind = total.dtype.kind
    if kind == "c":
        if out is None:
            out = total.copy()
        divide(total.real, count, out.real)
        divide(total.imag, count, out.imag)
        return out
    divisor = count if kind in "iu" else total.dtype.type(count)
    return np.divide(total, divisor) if out is None else np.divide(total, divisor, out)


def finish(wide: Any, divisor: int, total: Any) -> None:
    """Write a combination to ``total``, divided for a mean, in its dtype. A floating ``wide`` is changed."""
    if divisor != 1:
        if wide.dtype.kind in "iu":
            divide(wide, divisor, total)
            return
        divide(wide, divisor, wide)
    if wide is not total:
        total[...] = wide
