"""Verifications find nothing in programs of Keras and PyTorch in which nothing is wrong."""

import importlib.util
import re

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("torch", "keras")
]


def test_programs_raise_no_alarm(run_ranks):
    ended = run_ranks(2, "-m", "tests.ranks.verify.quiet_programs", 60, 1, "torch", "keras").check()
    found = dict(re.findall(r"(\w+): 60 steps, (\d+) verifications", ended.output))
    assert [*found] == ["torch", "keras"]
    assert min(map(int, found.values())) > 2
