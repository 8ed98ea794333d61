"""What metrics add up in: a float64, or where the strategy's sums are exact, all the bits there can be."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.strategy import Variable, get_strategy
from mpistrat.values import VariableAggregation, VariableSynchronization


class Total:
    """A sum over the values of all replicas, in a variable that is summed when read.

    Parameters
    ----------
    name : str
        Of the variable.
    """

    def __init__(self, name: str):
        self.variable = self._variable(name, np.zeros((), np.float64))

    @staticmethod
    def _variable(name: str, value: np.ndarray) -> Variable:
        with get_strategy().extended._variables_on_host():
            return Variable(
                value,
                name=name,
                synchronization=VariableSynchronization.ON_READ,
                aggregation=VariableAggregation.SUM,
            )

    def add(self, values: np.ndarray) -> None:
        """Add float64 values of this replica, of any shape."""
        self.variable.assign_add(values.sum())

    def result(self) -> Any:
        """The sum as a float64: over all replicas in cross-replica context, where it is collective."""
        return self.variable.read_value()[()]


_DIGIT = 20  # bits of a digit
# A file's sum is handed out to the replicas by a division that drops remainders: they are lost below the digits.
_GUARD = 20
_LOWEST = (
    -1126
)  # the exponent of the first digit's lowest bit: no float64 has a lower bit when scaled to 53 of them
_DIGITS = 112  # enough for 2 ** 60 times the largest float64
_CALL = 1 << 26  # values that can be added before a carry


class ExactTotal(Total):
    """A sum whose bits depend on the values alone, not on batches, order or replicas.

    A superaccumulator: one fixed-point number with a digit for every bit that a float64 can have (Neal, "Fast exact
    summation using small and large superaccumulators", 2015, arXiv:1505.05571). It is rounded when read.

    `exact_sum` cannot replace it: that needs the exponents of all values before it begins, and batches come one by one.
    Nor can this replace `exact_sum`: it takes 115 integers for each number that is summed.
    """

    def __init__(self, name: str):
        self.variable = self._variable(name, np.zeros(_DIGITS + 3, np.int64))

    def add(self, values: np.ndarray) -> None:
        """As `Total.add`."""
        own = self.variable._own_copy()
        words = own.copy()
        flat = values.reshape(-1)
        for start in range(0, len(flat), _CALL):
            words += _digits_of(flat[start : start + _CALL]) << _GUARD
            _carry(words[:_DIGITS], _GUARD)
        self.variable.assign_add(words - own)

    def result(self) -> Any:
        """As `Total.result`."""
        words = self.variable.read_value()
        digits = ((words + (1 << (_GUARD - 1))) >> _GUARD).tolist()
        above, below, undefined = digits[_DIGITS:]
        if undefined or (above and below):
            return np.float64(np.nan)
        if above or below:
            return np.float64(np.inf if above else -np.inf)
        total = sum(digit << (_DIGIT * i) for i, digit in enumerate(digits[:_DIGITS]))
        try:
            return np.float64(total / (1 << -_LOWEST))  # Python rounds a quotient of integers once
        except OverflowError:
            return np.float64(np.inf if total > 0 else -np.inf)


def _digits_of(values: np.ndarray) -> np.ndarray:
    """The sum of some values as digits, then how many are infinite, minus infinite, and no number."""
    out = np.zeros(_DIGITS + 3, np.int64)
    out[_DIGITS:] = (values == np.inf).sum(), (values == -np.inf).sum(), np.isnan(values).sum()
    mantissa, exponent = np.frexp(np.where(np.isfinite(values), values, 0.0))
    whole = np.ldexp(mantissa, 53).astype(np.int64)
    first, shift = np.divmod(exponent - (53 + _LOWEST), _DIGIT)
    low = (whole & ((1 << 40) - 1)) << shift
    high = (whole >> 40) << shift
    np.add.at(out, first, low & ((1 << _DIGIT) - 1))
    np.add.at(out, first + 1, (low >> _DIGIT) & ((1 << _DIGIT) - 1))
    np.add.at(out, first + 2, (low >> 2 * _DIGIT) + high)
    for _ in range(3):
        _carry(out[:_DIGITS], 0)
    return out


def _carry(words: np.ndarray, guard: int) -> None:
    """Hand what exceeds a digit on to the next one, which may then exceed it by a little."""
    over = words[:-1] >> (_DIGIT + guard)
    words[:-1] -= over << (_DIGIT + guard)
    words[1:] += over << guard


def new_total(name: str) -> Total:
    """A total of the kind that the current strategy's reductions ask for."""
    exact = get_strategy().extended._options.algorithm == "exact"
    return ExactTotal(name) if exact else Total(name)
