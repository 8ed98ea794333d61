"""Sums of metrics: in float64, or exact in fixed point if the strategy's sums are exact."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.strategy import Variable, get_strategy
from mpistrat.values import VariableAggregation, VariableSynchronization
from mpistrat.variables import read_together


def summed_when_read(name: str, value: np.ndarray) -> Variable:
    """Create a variable on the host whose copies are summed over the replicas when it is read."""
    with get_strategy().extended.engine.variables_on_host():
        return Variable(
            value, name=name, synchronization=VariableSynchronization.ON_READ, aggregation=VariableAggregation.SUM
        )


class Total:
    """A float64 sum over the values of all replicas, in a variable of this name that is summed when read."""

    def __init__(self, name: str):
        self.variable = summed_when_read(name, np.zeros((), np.float64))

    def add(self, values: np.ndarray) -> None:
        """Add float64 values of any shape to the sum of this replica."""
        self.variable.assign_add(np.asarray(np.add.reduce(values, None)))

    def result(self) -> Any:
        """Return the sum as a float64. Collective in cross-replica context, where it is over all replicas."""
        return results(self)[0]

    def of(self, value: np.ndarray) -> Any:
        """Return the sum of which ``value`` is the value of the variable."""
        return value[()]


def results(*totals: Total) -> list[Any]:
    """Return several sums as `Total.result` does, in one message."""
    values = read_together([total.variable for total in totals])
    return [total.of(value) for total, value in zip(totals, values, strict=True)]


_DIGIT = 20  # bits per digit
# A loaded sum is divided by the number of replicas, and the remainder is dropped: it is lost below the digits.
_GUARD = 20
_LOWEST = -1126  # exponent of the lowest bit of the first digit: a float64 scaled to 53 bits has no lower bit
_DIGITS = 112  # enough for 2 ** 60 times the largest float64
_CALL = 1 << 26  # values that fit before a carry


class ExactTotal(Total):
    """An exact sum: its bits do not depend on batches, order or the number of replicas.

    It is a superaccumulator: a fixed-point number whose digits cover all bits of a float64 (Neal, "Fast exact
    summation using small and large superaccumulators", 2015, arXiv:1505.05571). It is rounded when read.

    `exact_sum` needs the exponents of all values before it begins, but batches come one by one. This class is not
    used there because it takes 115 integers for each number in the result.
    """

    def __init__(self, name: str):
        self.variable = summed_when_read(name, np.zeros(_DIGITS + 3, np.int64))

    def add(self, values: np.ndarray) -> None:
        """Add float64 values of any shape to the sum of this replica."""
        own = self.variable.own_copy()
        words = own.copy()
        flat = values.reshape(-1)
        for start in range(0, len(flat), _CALL):
            words += _digits_of(flat[start : start + _CALL]) << _GUARD
            _carry(words[:_DIGITS], _GUARD)
        self.variable.assign_add(words - own)

    def of(self, words: np.ndarray) -> Any:
        digits = ((words + (1 << (_GUARD - 1))) >> _GUARD).tolist()
        above, below, undefined = digits[_DIGITS:]
        if undefined or (above and below):
            return np.float64(np.nan)
        if above or below:
            return np.float64(np.inf if above else -np.inf)
        total = sum(digit << (_DIGIT * i) for i, digit in enumerate(digits[:_DIGITS]))
        try:
            return np.float64(total / (1 << -_LOWEST))  # Python rounds a quotient of integers only once
        except OverflowError:
            return np.float64(np.inf if total > 0 else -np.inf)


def _digits_of(values: np.ndarray) -> np.ndarray:
    """Return the sum of values as digits, then the counts of inf, -inf and NaN."""
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
    """Add the overflow of each digit to the next digit, which may then overflow a little itself."""
    over = words[:-1] >> (_DIGIT + guard)
    words[:-1] -= over << (_DIGIT + guard)
    words[1:] += over << guard
