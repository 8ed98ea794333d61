"""`mpistrat check` on nodes with a slow link, and with a cable that is pulled while it runs."""

import json
import os

import pytest

CHECK = ("-m", "mpistrat", "check", "--json")
LIMIT = 200
pytestmark = pytest.mark.timeout(900)


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


# What Python runs first in every process: a node looks for the file of rank 0 until the test lets it go on.
SEARCH = """
import sys
if "mpistrat.cli.check.child" in sys.orig_argv:
    from mpistrat.cli.check import checks
    checks._VISIBLE_TIMEOUT_S = 1000
"""


def test_cut_link(cluster, tmp_path, monkeypatch):
    """Rank 0 says who is silent, in a time that is not longer than the limit, and which check it was."""
    (tmp_path / "sitecustomize.py").write_text(SEARCH)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    arguments = ("--limit", "30", "--data", "/dev/shm")  # each node has its own: the others look for a while
    started = cluster.start((1, 1, 1), *CHECK, *arguments, options=("-wdir", str(tmp_path)))

    def searched():
        names = cluster.run_on(0, "ls", "-A", "/dev/shm").stdout.split()
        return [name for name in names if name.startswith(".mpistrat-check-") and not name.endswith(".h5")]

    try:
        started.wait_until(searched, "the search for a file of rank 0", LIMIT)
        cluster.cut(2)
        cluster.run_on(1, "touch", *(f"/dev/shm/{name}" for name in searched()))
        started.wait_for("\n}", LIMIT)
        checks = checks_of(started.output())
    finally:
        cluster.heal(2)
        cluster.clear()
        started.wait(10)
        for node in (0, 1):
            cluster.run_on(node, "sh", "-c", "rm -f /dev/shm/.mpistrat-check-*")
    assert checks["start"]["verdict"] == "fix", started.output()
    assert "rank 0 (node0): no message from rank" in checks["start"]["found"], started.output()
    assert "[2] in 24 s" in checks["start"]["found"]
    assert "'data directory'" in checks["start"]["found"]
    assert checks["network"]["verdict"] == "not checked"
