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


@pytest.mark.timeout(250)
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_in_a_scope(run_ranks, ranks):
    environ = {"KERAS_BACKEND": "torch"} if "KERAS_BACKEND" not in os.environ else {}
    run_ranks(ranks, PROGRAM, limit=200, **environ).check().shows("all checks passed")


IMPORTS_IN_SCOPE = """
import numpy as np
import mpistrat

strategy = mpistrat.MultiWorkerMirroredStrategy()
with strategy.scope():
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
try:
    model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
except RuntimeError as error:
    assert "Sequential.fit: Keras' training would fit another model" in str(error)
    print("refused")
"""


@pytest.mark.timeout(250)
def test_keras_that_is_imported_in_a_scope(run_ranks, tmp_path):
    """As by TensorFlow, which imports Keras at the first use of ``tf.keras``."""
    program = tmp_path / "program.py"
    program.write_text(IMPORTS_IN_SCOPE)
    environ = {"KERAS_BACKEND": "torch"} if "KERAS_BACKEND" not in os.environ else {}
    run_ranks(2, program, limit=200, **environ).check().shows("refused")
