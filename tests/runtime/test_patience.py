"""Calls that may never return."""

import threading

import pytest

from mpistrat.runtime.process.patience import within


def test_a_result_or_an_error_comes_back():
    assert within(60.0, lambda: None) is None
    with pytest.raises(ZeroDivisionError):
        within(60.0, lambda: 1 / 0)


def test_a_call_that_does_not_return_is_left_alone():
    release = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        within(0.05, release.wait)
    release.set()
