"""Finding rows with values that are no numbers."""

from __future__ import annotations

import math

import numpy as np


def first_not_finite(values: np.ndarray) -> tuple[int, object] | None:
    """The first row with NaN or infinity in it, and that value; None if there is no such row.

    Looks into compound types and arrays of variable length. Values that are no floating point numbers are finite.

    Examples
    --------
    >>> first_not_finite(np.array([[1.0, 2.0], [3.0, np.inf]]))
    (1, inf)
    >>> first_not_finite(np.array([[1.0, 2.0], [3.0, 4.0]])) is None
    True
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
        if np.isfinite(np.add.reduce(values, axis=None)):  # as most are, at a quarter of the price
            return None
    wrong = ~np.isfinite(values)
    if not wrong.any():  # finite, but too large together
        return None
    at = np.unravel_index(int(wrong.argmax()), values.shape)
    return int(at[0]), values[at].item()


def _first_of_objects(values: np.ndarray) -> tuple[int, object] | None:
    per_row = math.prod(values.shape[1:])
    for number, each in enumerate(values.flat):
        if isinstance(each, np.ndarray) and (found := first_not_finite(each.reshape(-1))):
            return number // per_row, found[1]
    return None
