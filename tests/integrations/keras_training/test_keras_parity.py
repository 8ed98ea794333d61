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


# By the first rank and by the last.
KINDS = ["callback", "epoch", "data", "metric", "fewer"]
QUICK = [("callback", 0), ("epoch", 1), ("data", 0), ("metric", 1), ("fewer", 0), ("alone", 0)]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("kind", "rank"), [*((kind, rank) for kind in KINDS for rank in (0, 1)), ("alone", 0)] if ALL else QUICK
)
@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"] if ALL else ["torch"])
def test_a_fault_of_one_rank(run_ranks, backend, kind, rank):
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    environ = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    ended = run_ranks(2, FAULTS, kind, rank, limit=150, **environ)
    assert ended.status not in (0, None), str(ended)
    told = {"fewer": "MismatchError", "alone": "was called by a callback of the chief alone"}
    ended.shows(told.get(kind, f"a failure in {kind}"))
    assert "trained\n" not in ended.output


@pytest.mark.timeout(400)
@pytest.mark.parametrize("rank", [0, 1] if ALL else [0])
@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"] if ALL else ["torch"])
def test_killed_in_a_backup(run_ranks, tmp_path, backend, rank):
    """A rank is killed while the chief writes; another number of ranks goes on."""
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    environ = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    ended = run_ranks(2, FAULTS, "killed", rank, tmp_path, limit=150, **environ)
    assert ended.status not in (0, None), str(ended)
    ended.shows("epoch 2")
    run_ranks(1, FAULTS, "resumed", rank, tmp_path, limit=150, **environ).check().shows("resumed")
