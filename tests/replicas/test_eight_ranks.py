"""Programs of eight ranks: the same bits as on one by virtual replicas, and replicas of two devices."""


def test_eight_ranks(run_ranks):
    files = "tests/ranks/replicas/test_same_bits.py", "tests/ranks/mesh/test_tpu.py"
    chosen = *files, "-k", "on_eight_ranks"
    ended = run_ranks(8, "-m", "pytest", *chosen, "-p", "no:cacheprovider", "-m", "")
    ended.check()
    assert "5 passed" in ended.output
