"""Torch under several ranks: the tests of ``tests/ranks/integrations`` that need it."""

import importlib.util
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

TESTS = Path(__file__).parents[1] / "ranks" / "integrations"
SUMMARY = re.compile(r"=+ (.*\d+ passed.* in .*?) =+")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.mpich), 3])
def test_ranks(n, run_ranks, summarize):
    files = [path for path in sorted(TESTS.rglob("test_*.py")) if 'importorskip("torch' in path.read_text()]
    files.append(TESTS.parent / "replicas" / "test_settings.py")
    arguments = ("-m", "pytest", *files, "-p", "no:cacheprovider", "--color=no", "-m", "", "--ranks-timeout=250")
    ended = run_ranks(n, *arguments, limit=240).check()
    counts = [match[1] for line in ended.output.splitlines() if (match := SUMMARY.fullmatch(line))]
    summarize(f"torch, {n} rank{'s' * (n > 1)}: {counts[-1]}")
