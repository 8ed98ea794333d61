"""`mpistrat check` on nodes with a slow link, and with a cable that is pulled while it runs."""

import json

import pytest

CHECK = ("-m", "mpistrat", "check", "--json")
LIMIT = 60


def checks_of(output):
    """The findings, by name."""
    return json.loads(output[output.find("{\n") : output.rfind("\n}") + 2])["checks"]


@pytest.mark.mpich
def test_slow_link(cluster, tmp_path):
    cluster.limit(2, "80mbit")
    try:
        started = cluster.start((2, 1, 1), *CHECK, options=("-wdir", str(tmp_path)), OMP_NUM_THREADS="1")
        status = started.wait(LIMIT)
    finally:
        cluster.limit(2, cluster.rate)
        cluster.clear()
    assert status not in (0, None), started.output()
    checks = checks_of(started.output())
    assert checks["start"]["verdict"] == checks["layout"]["verdict"] == "ok"
    assert checks["network"]["verdict"] == "fix", started.output()
    assert "node2" in checks["network"]["found"].partition(";")[0]
    assert "node2 is in all slow pairs" in checks["network"]["advice"]


def test_cut_link(cluster, tmp_path):
    """Rank 0 says who is silent, in a time that is not longer than the limit, and which check it was."""
    arguments = ("--limit", "6", "--data", "/dev/shm")  # each node has its own: the others look for a while
    started = cluster.start((1, 1, 1), *CHECK, *arguments, options=("-wdir", str(tmp_path)))

    def others_look():
        names = cluster.run_on(0, "ls", "-A", "/dev/shm").stdout.split()
        return any(name.startswith(".mpistrat-check-") and not name.endswith(".h5") for name in names)

    try:
        started.wait_until(others_look, "the search for a file of rank 0", LIMIT)
        cluster.cut(2)
        started.wait_for("\n}", LIMIT)
        checks = checks_of(started.output())
    finally:
        cluster.heal(2)
        cluster.clear()
        started.wait(10)
        cluster.run_on(0, "sh", "-c", "rm -f /dev/shm/.mpistrat-check-*")
    assert checks["start"]["verdict"] == "fix", started.output()
    assert "rank 0 (node0): no message from rank" in checks["start"]["found"], started.output()
    assert "[2] in 4.8 s" in checks["start"]["found"]
    assert "'data directory'" in checks["start"]["found"]
    assert checks["network"]["verdict"] == "not checked"
