"""Programs of eight ranks: the same bits as on one by virtual replicas, meshes, and replicas of several ranks."""

import pytest


@pytest.mark.timeout(360)
def test_eight_ranks(run_ranks):
    files = "tests/ranks/replicas/test_same_bits.py", "tests/ranks/mesh", "tests/ranks/test_conformance.py"
    chosen = *files, "-k", "on_eight_ranks or answer_of_a_layer or answer_of_logical_devices"
    ended = run_ranks(8, "-m", "pytest", *chosen, "-p", "no:cacheprovider", "-m", "", "--ranks-timeout=250", limit=300)
    ended.check()
    assert "17 passed" in ended.output
