"""Keras' own training is refused in a scope of several replicas, where each rank would fit a model of its own."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

# Not importorskip: Keras loads a backend when it is imported, of its own choice.
for name in ("keras", "torch"):
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
PROGRAM = Path(__file__).with_name("keras_programs.py")


@pytest.mark.timeout(150)
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_in_a_scope(run_ranks, ranks):
    environ = {"KERAS_BACKEND": "torch"} if "KERAS_BACKEND" not in os.environ else {}
    run_ranks(ranks, PROGRAM, limit=100, **environ).check().shows("all checks passed")
