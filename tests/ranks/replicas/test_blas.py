"""Ranks whose BLAS differs, and files that were saved with another one."""

import re
import warnings

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.runtime import affinity

SIZE, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank


def strategy():
    return mpistrat.MultiWorkerMirroredStrategy(virtual_replicas=SIZE + 1)


def test_ranks_with_another_kernel_are_named(monkeypatch):
    kernel = "Haswell" if RANK == SIZE - 1 else "SkylakeX"
    monkeypatch.setattr(affinity, "blas", lambda: f"openblas 0.3.31 {kernel}, 1 thread(s)")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        strategy()
        if SIZE > 1:
            mpistrat.MultiWorkerMirroredStrategy()  # which promises no bits
    texts = [str(each.message) for each in told if "BLAS" in str(each.message)]
    assert len(texts) == (RANK == 0 and SIZE > 1)
    if texts:
        others = "0" if SIZE == 2 else f"0-{SIZE - 2}"
        pattern = rf"rank\(s\) {others}: openblas .* SkylakeX, 1 .*rank\(s\) {SIZE - 1}: openblas .* Haswell, 1 .*"
        assert re.search(pattern + "OPENBLAS_CORETYPE", texts[0])


@pytest.mark.parametrize("virtual", [True, False])
def test_a_file_of_another_blas_is_told(virtual, tmp_path, monkeypatch, caplog):
    made = strategy() if virtual else mpistrat.MultiWorkerMirroredStrategy()
    with made.scope():
        state = [mpistrat.Variable(np.zeros(2), name="v")]
    mpistrat.training.save(state, tmp_path / "v.h5")
    mpistrat.training.load(state, tmp_path / "v.h5")
    assert not caplog.records
    own = affinity.blas()
    monkeypatch.setattr(affinity, "blas", lambda: "openblas 0.3.31 Haswell, 64 thread(s)")
    mpistrat.training.load(state, tmp_path / "v.h5")
    texts = [each.getMessage() for each in caplog.records]
    assert len(texts) == (virtual and RANK == 0)
    if texts:
        assert f"number of threads ({own}) than is used now (openblas 0.3.31 Haswell, 64 thread(s))" in texts[0]
