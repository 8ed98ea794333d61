"""One report for a rank of several nodes that others wait for, and for a node that is cut off or gone."""

from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "faults" / "hangs.py"
LIMIT = 60
LAYOUT = (2, 1, 2)
pytestmark = pytest.mark.mpich


def reports(folder):
    """The first report on each hang. Where a strategy takes long to make, that is reported, too."""
    first = {}
    for path in sorted(folder.glob("hang-*"), key=lambda each: each.stat().st_mtime_ns):
        first.setdefault(tuple(path.name.split("-")[1:3]), path.read_text())
    return [text for text in first.values() if "the creation of a strategy" not in text]


@pytest.fixture
def start(cluster, tmp_path):
    jobs = []

    def start(*names):
        environ = {"CULPRIT": "3", "MPISTRAT_HANG_SECONDS": "1", "MPISTRAT_RECORD_DIR": str(tmp_path)}
        environ["HOME"] = str(tmp_path)
        jobs.append(cluster.start(LAYOUT, PROGRAM, *names, options=("-wdir", str(tmp_path)), **environ))
        return jobs[-1]

    yield start
    cluster.heal(2)
    cluster.clear()
    assert None not in [each.wait(LIMIT) for each in jobs]


def test_one_report_for_all_nodes(start, tmp_path):
    started = start("sleep", "stopped", "skipped")
    assert started.wait(LIMIT) == 0, started.output()
    found = reports(tmp_path)
    for text, cause in zip(found, ("sleep", "stopped", "skipped"), strict=True):
        assert text.startswith("mpistrat, rank 0: ranks 0-2, 4 of 5 wait for rank 3 since"), text
        assert "rank 3 (node2 process " in text
        assert f"cause: {cause}." in text, text
    assert not list(tmp_path.glob(".mpistrat-board-*"))


@pytest.mark.parametrize(("name", "cause"), [("link", "network"), ("node", "node")])
def test_a_node_that_is_cut_off(cluster, start, tmp_path, name, cause):
    started = start(name)
    started.wait_for("in step\n", LIMIT)
    cluster.cut(2) if name == "link" else cluster.power_off(2)
    started.wait_until(lambda: bool(reports(tmp_path)), "a report", LIMIT)
    text = reports(tmp_path)[0]
    assert "ranks 0-2 of 5 wait for ranks 3-4 since" in text, text
    assert "ranks 3-4 (node2): " in text
    assert f"cause: {cause}." in text, text
