"""Keras trains over ranks as in one process: each row of parity.py, on each backend and number of ranks.

The rows of one backend and number of ranks share a launch. The core has the rows that are marked as quick, the checks
and the faults that a program catches, on two ranks, in one launch of each backend;
``MPISTRAT_TEST_KERAS=all python -m pytest tests/integrations/keras_training`` runs all, on 1, 2 and 3.
"""

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("keras") is None:
    pytest.skip("keras is not installed", allow_module_level=True)
PARITY, CHECKS, FAULTS, TOGETHER, CORRECTNESS, STRATEGIES, HOROVOD = (
    Path(__file__).with_name(f"{name}.py")
    for name in ("parity", "checks", "faults", "together", "correctness", "strategy_tests", "horovod_keras")
)
ALL = os.environ.get("MPISTRAT_TEST_KERAS") == "all"
BACKENDS = ["torch", "jax", "tensorflow"]


def run(run_ranks, backend, ranks, *arguments, limit, needs=()):
    for needed in (backend, *needs):
        if find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    environ = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    if not ALL:  # XLA without optimizations, on JAX without fusions: a third of its processor time
        more = " --xla_cpu_use_fusion_emitters=false" if backend == "jax" else ""
        environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true{more}"
    return run_ranks(ranks, *arguments, limit=limit, **environ)


def has_rows(ended, kind, least):
    rows = re.findall(rf"^{kind} (.+?): (ok|OFF)", ended.output, re.M)
    assert len(rows) >= least, str(ended)
    assert [name for name, found in rows if found != "ok"] == [], str(ended)


if ALL:

    @pytest.mark.timeout(3000)
    @pytest.mark.parametrize("ranks", [1, 2, 3])
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_rows(run_ranks, backend, ranks):
        needs = ["torch", "jax", "tensorflow", "pandas"]
        ended = run(run_ranks, backend, ranks, PARITY, limit=2900, needs=needs).check()
        has_rows(ended, "row", 55)

    @pytest.mark.timeout(900)
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_callbacks_and_errors(run_ranks, tmp_path, backend):
        ended = run(run_ranks, backend, 2, TOGETHER, FAULTS, "caught", "+", CHECKS, tmp_path, limit=800).check()
        ended.shows("all faults were told")
        ended.shows("all checks passed")

else:
    CASES = ["dnn, partial, arrays", "siamese, dataset", "stateful_lstm"]
    # What depends on how a backend computes. All checks are on PyTorch, which compiles nothing.
    CHECKS_OF_COMPILED = [
        "callbacks_of_the_chief",
        "stop_by_one_rank",
        "nan_on_one_rank",
        "weights_of_one_rank",
        "first_weights",
        "other_input",
        "losses_of_whole_batches",
        "losses_of_the_program",
        "own_test_step",
        "errors_of_the_program",
        "own_updates",
        "strings",
        "datasets",
        "predictions_for_the_chief",
        "what_cannot_be_trained",
        "files_of_batch_norm",
        "batch_norm_far_from_zero",
        "plain_batch_norm",
        "no_tracing_after_an_epoch",
        "compiled_by_xla",
        "random_numbers",
        "evaluation_in_a_callback",
        "overflow_on_one_rank",
        "saving",
        "backup",
        "restored_with_its_state",
    ]

    @pytest.mark.timeout(620)
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_rows_and_checks(run_ranks, tmp_path, backend):
        """On TensorFlow with some of its own tests and of Keras', on PyTorch with Horovod's.

        test_keras_suites.py says which.
        """
        checks = () if backend == "torch" else CHECKS_OF_COMPILED
        programs = [FAULTS, "caught", "+", PARITY, "quick", "+", CHECKS, tmp_path, *checks]
        if backend == "tensorflow":
            programs += ["+", CORRECTNESS, *CASES, "+", STRATEGIES]
        if backend == "torch":
            programs += ["+", HOROVOD, tmp_path]
        ended = run(run_ranks, backend, 2, TOGETHER, *programs, limit=600).check()
        has_rows(ended, "row", 13)
        passed = re.findall("^passed (.+)", ended.output, re.M)
        assert {*checks} <= {*passed}, str(ended)
        ended.shows("all checks passed")
        ended.shows("all faults were told")
        if backend == "tensorflow":
            has_rows(ended, "case", len(CASES))
        if backend != "jax":
            ended.shows("all tests passed")


# By the first rank and by the last.
KINDS = ["callback", "epoch", "data", "metric", "fewer"]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("kind", "rank"), [*((kind, rank) for kind in KINDS for rank in (0, 1)), ("alone", 0)] if ALL else [("callback", 0)]
)
@pytest.mark.parametrize("backend", BACKENDS if ALL else ["jax"])
def test_a_fault_that_ends_the_job(run_ranks, backend, kind, rank):
    """The other kinds of test_rows_and_checks, in a program that does not catch them, are among all."""
    ended = run(run_ranks, backend, 2, TOGETHER, FAULTS, kind, rank, limit=150)
    assert ended.status not in (0, None), str(ended)
    told = {"fewer": "MismatchError", "alone": "was called by a callback of the chief alone"}
    ended.shows(told.get(kind, f"a failure in {kind}"))
    assert "trained\n" not in ended.output


@pytest.mark.timeout(400)
@pytest.mark.parametrize("rank", [0, 1] if ALL else [0])
@pytest.mark.parametrize("backend", BACKENDS if ALL else ["jax"])
def test_killed_in_a_backup(run_ranks, tmp_path, backend, rank):
    """A rank is killed while the chief writes; another number of ranks goes on."""
    ended = run(run_ranks, backend, 2, TOGETHER, FAULTS, "killed", rank, tmp_path, limit=150)
    assert ended.status not in (0, None), str(ended)
    ended.shows("epoch 2")
    run(run_ranks, backend, 1, TOGETHER, FAULTS, "resumed", rank, tmp_path, limit=150).check().shows("resumed")
