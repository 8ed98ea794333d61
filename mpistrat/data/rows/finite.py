"""Search for rows with NaN or infinity."""

from __future__ import annotations

import math

import numpy as np


def first_not_finite(values: np.ndarray) -> tuple[int, object] | None:
    """Return the first row that holds NaN or infinity, and that value; None if all values are finite.

    Compound types and arrays of variable length are searched too. Values of other than floating point types
    count as finite.

    Examples
    --------
    >>> first_not_finite(np.array([[1.0, 2.0], [3.0, np.inf]]))
    (1, inf)
    >>> print(first_not_finite(np.array([[1.0, 2.0], [3.0, 4.0]])))
    None
    """
    if not len(values):
        return None
    if values.dtype.names:
        found = [first_not_finite(values[name]) for name in values.dtype.names]
        return min((each for each in found if each), key=lambda each: each[0], default=None)
    if values.dtype.hasobject:
        return _first_of_objects(values)
    if values.dtype.kind not in "fc":
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(np.add.reduce(values, axis=None)):  # fast path: takes a quarter of the time
            return None
    wrong = ~np.isfinite(values)
    if not wrong.any():  # all values are finite, only their sum overflowed
        return None
    at = np.unravel_index(int(wrong.argmax()), values.shape)
    return int(at[0]), values[at].item()


def _first_of_objects(values: np.ndarray) -> tuple[int, object] | None:
    per_row = math.prod(values.shape[1:])
    for number, each in enumerate(values.flat):
        if isinstance(each, np.ndarray) and (found := first_not_finite(each.reshape(-1))):
            return number // per_row, found[1]
    return None
