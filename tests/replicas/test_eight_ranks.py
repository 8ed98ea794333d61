"""Training with virtual replicas has the same bits on eight ranks, and on six, as on one."""


def test_eight_ranks(run_ranks):
    chosen = "tests/ranks/replicas/test_same_bits.py", "-k", "on_eight_ranks"
    ended = run_ranks(8, "-m", "pytest", *chosen, "-p", "no:cacheprovider", "-m", "")
    ended.check()
    assert "4 passed" in ended.output
