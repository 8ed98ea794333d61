"""The tests of TensorFlow, Keras and Horovod for Keras over ranks, translated: the programs say what differs.

The core has Horovod's on PyTorch and two ranks, and some of the others on TensorFlow, in test_keras_parity.py;
``MPISTRAT_TEST_KERAS=all python -m pytest tests/integrations/keras_training`` runs all, on each backend, on 2 and 3.
"""

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("keras") is None:
    pytest.skip("keras is not installed", allow_module_level=True)
HERE = Path(__file__).parent
EXAMPLE = HERE.parents[2] / "docs" / "examples" / "keras_fit.py"
ALL = os.environ.get("MPISTRAT_TEST_KERAS") == "all"
BACKENDS = ["torch", "jax", "tensorflow"]


LAUNCHES = [(each, ranks) for each in BACKENDS for ranks in (2, 3)]


def run(run_ranks, backend, ranks, program, *arguments, limit=2900):
    for needed in (backend, "tensorflow"):
        if find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    environ = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    return run_ranks(ranks, program, *arguments, limit=limit, **environ)


if ALL:

    @pytest.mark.timeout(3000)
    @pytest.mark.parametrize(("backend", "ranks"), [*LAUNCHES, ("torch", 1)])
    def test_horovod(run_ranks, tmp_path, backend, ranks):
        ended = run(run_ranks, backend, ranks, HERE / "horovod_keras.py", tmp_path).check()
        ended.shows("all tests passed")

    @pytest.mark.timeout(3000)
    @pytest.mark.parametrize(("backend", "ranks"), LAUNCHES)
    def test_correctness_of_tensorflow(run_ranks, backend, ranks):
        ended = run(run_ranks, backend, ranks, HERE / "correctness.py").check()
        rows = re.findall(r"^case (.+): (ok|OFF)", ended.output, re.M)
        assert len(rows) == 61, str(ended)
        assert [name for name, found in rows if found != "ok"] == [], str(ended)

    @pytest.mark.timeout(3000)
    @pytest.mark.parametrize(("backend", "ranks"), LAUNCHES)
    def test_strategies_of_keras(run_ranks, backend, ranks):
        ended = run(run_ranks, backend, ranks, HERE / "strategy_tests.py").check()
        ended.shows("all tests passed")

    @pytest.mark.timeout(900)
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_example_on_four_ranks(run_ranks, tmp_path, backend):
        """It reaches what it reaches on one: the loss and the accuracy of each epoch."""
        found = []
        for ranks in (1, 4):
            curves = tmp_path / f"{ranks}.png"
            lines = run(run_ranks, backend, ranks, EXAMPLE, "--plot", curves, limit=400).check().output
            assert curves.stat().st_size > 10_000
            epochs = re.findall(r"loss (\S+)  test accuracy (\S+)", lines)
            found.append([list(map(float, each)) for each in epochs])
        alone, four = found
        assert len(alone) == len(four) >= 3
        for one, other in zip(alone, four, strict=True):
            assert one == pytest.approx(other, abs=5e-3), found
        assert max(accuracy for _, accuracy in four) > 0.9, found

    @pytest.mark.timeout(200)
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_a_fault_of_one_rank_of_horovod(run_ranks, tmp_path, backend):
        ended = run(run_ranks, backend, 2, HERE / "horovod_keras.py", tmp_path, "failure_of_one_rank", limit=150)
        assert ended.status not in (0, None), str(ended)
        ended.shows("a failure of one rank")
