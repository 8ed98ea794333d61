"""The division of a sum by a count, as a mean needs it."""

from __future__ import annotations

from typing import Any

import numpy as np


def divide(total: Any, count: Any, out: Any = None) -> Any:
    """Return ``total / count`` for a count of replicas or examples.

    The parts of complex numbers are divided one by one: NumPy and CuPy multiply by a complex number, which makes
    ``(inf + 2j) / 1`` a nan.

    Parameters
    ----------
    total : array of NumPy or CuPy
    count : int, or array of int of shape ()
    out : array, optional
        The array to write the result to; may be ``total``.

    Examples
    --------
    >>> divide(np.array([complex(np.inf, 2)]), 2)
    array([inf+1.j])
    >>> divide(np.array([3, 4]), 2)
    array([1.5, 2. ])
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
