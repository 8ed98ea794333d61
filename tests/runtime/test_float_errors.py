"""Sums without floating point errors, whatever the user asked NumPy for."""

import numpy as np
import pytest

from mpistrat.runtime import float_errors


@pytest.mark.parametrize("ignoring", [float_errors.ignoring(), float_errors._under_errstate])
def test_ignored_inside_and_as_before_outside(ignoring):
    huge = np.full(2, np.finfo(np.float64).max)
    with np.errstate(all="raise"):
        assert np.isinf(ignoring(np.add, huge, huge)).all()
        out = np.empty(2)
        assert ignoring(np.add, huge, huge, out=out) is out
        with pytest.raises(FloatingPointError):
            np.add(huge, huge)
        with pytest.raises(ZeroDivisionError):  # and the next call works
            ignoring(lambda: 1 // 0)
        assert ignoring(np.geterr)["over"] == "ignore"
        assert np.geterr()["over"] == "raise"
