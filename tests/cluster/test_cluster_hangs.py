"""One report for a rank of several nodes that others wait for, and for a node that is cut off or gone."""

import re
from pathlib import Path

import pytest
from faults.hangs import hang_reports

PROGRAM = Path(__file__).parents[1] / "faults" / "hangs" / "hangs.py"
LIMIT = 250
LAYOUT = (2, 1, 2)
pytestmark = [pytest.mark.mpich, pytest.mark.timeout(900)]


@pytest.fixture
def start(cluster, tmp_path):
    jobs = []

    def start(*names):
        environ = {"CULPRIT": "3", "MPISTRAT_HANG_SECONDS": "3", "MPISTRAT_RECORD_DIR": str(tmp_path)}
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
    found = hang_reports.first_reports(tmp_path, "ranks 0-2, 4 of 5 have waited for rank 3", "all_reduce ")
    for text, cause in zip(found.values(), ("sleep", "stopped", "skipped"), strict=True):
        assert "rank 3 (node2 process " in text
        assert f"cause: {cause}." in text, text
    names = [path.name.rpartition("-")[0] for path in tmp_path.glob("hang-*")]  # without that of the node
    assert len(set(names)) == len(names), names
    assert not list(tmp_path.glob(".mpistrat-board-*"))


@pytest.mark.parametrize(("name", "cause"), [("link", "network"), ("node", "node")])
def test_a_node_that_is_cut_off(cluster, start, tmp_path, name, cause):
    def reports():
        return hang_reports.first_reports(tmp_path, "ranks 0-2 of 5 have waited for ranks 3-4")

    started = start(name)
    started.wait_for("in step\n", LIMIT)
    before = reports()  # on a busy machine a node may be late
    cluster.cut(2) if name == "link" else cluster.power_off(2)
    started.wait_until(lambda: reports().keys() > before.keys(), "a report", LIMIT)
    (text,) = (text for hang, text in reports().items() if hang not in before)
    # As the links of the node, or as its processes: these wait in a call that the others have left, if the last
    # messages of that call came through.
    assert re.search(r"ranks 3-4 \(node2\b", text), text
    assert f"cause: {cause}." in text, text
