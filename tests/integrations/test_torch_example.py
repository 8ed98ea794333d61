"""The example with PyTorch has the same losses on any number of ranks."""

import importlib.util
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "torch_cnn.py"


def test_losses_do_not_depend_on_the_ranks(run_alone, run_ranks):
    found = []
    for ended in (run_alone(EXAMPLE), run_ranks(3, EXAMPLE)):
        losses = [float(each) for each in re.findall(r"loss (\S+)$", ended.check().output, re.MULTILINE)]
        assert losses[0] > 0.5 > 0.1 > losses[-1]
        found.append(losses)
    assert found[0] == pytest.approx(found[1], abs=1e-5)
