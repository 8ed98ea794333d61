"""Sums without floating point errors, whatever the user asked NumPy for."""

import numpy as np
import pytest

from mpistrat.runtime.agreement import collective_lock


@pytest.mark.parametrize("ignoring", [collective_lock.ignoring_float_errors(), collective_lock._under_errstate])
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


def test_settings_that_a_context_does_not_hold(monkeypatch):
    """NumPy 1 keeps them for the thread, which no context changes."""

    class OfTheThread:
        def run(self, function, *arguments, **keywords):
            return function(*arguments, **keywords)

    monkeypatch.setattr(collective_lock.contextvars, "Context", OfTheThread)
    with np.errstate(over="raise", divide="warn"):
        before = np.geterr()
        ignoring = collective_lock.ignoring_float_errors()
        assert np.geterr() == before
        assert np.isinf(ignoring(np.divide, np.ones(2), np.zeros(2))).all()
        assert np.geterr() == before
