"""Keras trains over ranks as in one process: each row of parity.py, on each backend and number of ranks.

The rows of one backend and number of ranks share a launch. The core has the rows that are marked as quick, on two
ranks; ``MPISTRAT_TEST_KERAS=all python -m pytest tests/integrations/keras_training`` runs all, on 1, 2 and 3.
"""

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("keras") is None:
    pytest.skip("keras is not installed", allow_module_level=True)
PARITY, CHECKS, FAULTS = (Path(__file__).with_name(f"{name}.py") for name in ("parity", "checks", "faults"))
ALL = os.environ.get("MPISTRAT_TEST_KERAS") == "all"
LAUNCHES = [
    (backend, ranks) for backend in ("torch", "jax", "tensorflow") for ranks in ((1, 2, 3) if ALL else (2,))
]


@pytest.mark.timeout(3000 if ALL else 520)
@pytest.mark.parametrize(("backend", "ranks"), LAUNCHES)
def test_rows(run_ranks, backend, ranks):
    for needed in (backend, "torch", "tensorflow") if ALL else (backend,):
        if find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    asked = [] if ALL else ["quick"]
    environ = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    ended = run_ranks(ranks, PARITY, *asked, limit=2900 if ALL else 500, **environ).check()
    rows = re.findall(r"^row (.+?): (ok|OFF)", ended.output, re.M)
    assert len(rows) >= (40 if ALL else 10), str(ended)
    assert [name for name, found in rows if found != "ok"] == [], str(ended)


@pytest.mark.timeout(900 if ALL else 520)
@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"])
def test_callbacks_and_errors(run_ranks, tmp_path, backend):
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    environ = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    ended = run_ranks(2, CHECKS, tmp_path, limit=800 if ALL else 500, **environ).check()
    ended.shows("all checks passed")


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", ["callback", "epoch", "data", "metric", "fewer"])
@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"] if ALL else ["torch"])
def test_a_fault_of_one_rank(run_ranks, backend, kind):
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    environ = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    ended = run_ranks(2, FAULTS, kind, limit=150, **environ)
    assert ended.status not in (0, None), str(ended)
    ended.shows("MismatchError" if kind == "fewer" else f"a failure in {kind}")
    assert "trained\n" not in ended.output
