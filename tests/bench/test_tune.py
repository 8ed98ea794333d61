"""`mpistrat bench tune` keeps what it has measured."""

import argparse
import json

import pytest

from mpistrat.bench import under_ranks
from mpistrat.collectives.algorithms import choose


@pytest.mark.parametrize("text", ["", "4", "0KiB", "4 KB", "-1MiB", "1.5MiB"])
def test_size(text):
    if text == "4":
        assert under_ranks.size(text) == 4
    else:
        with pytest.raises(argparse.ArgumentTypeError):
            under_ranks.size(text)


CHOSEN = """
import numpy as np, mpistrat
from mpistrat.collectives.algorithms.choose import Choice
topology = mpistrat.MultiWorkerMirroredStrategy().extended.engine.topology
choice = Choice.of(topology)
names = [choice.best(nbytes, np.dtype("f4")).algorithm.name for nbytes in (1000, 100_000)]
print(",".join(names))
"""


def test_tune(run_ranks, tmp_path, monkeypatch):
    """It keeps what it measured where it is looked for, and nothing if it should not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = ["-m", "mpistrat.bench.tune", "--sizes", "1KiB,64KiB", "--repetitions", "1", "--seconds", "0.1"]
    run_ranks(2, *arguments, "--dry-run").check()
    assert list(tmp_path.iterdir()) == []
    ended = run_ranks(2, *arguments).check()
    (path,) = tmp_path.glob("mpistrat/*")
    ended.shows("tune, 2 ranks\n", "\n1024 ", "\n65536 ", f"kept in {path}")
    content = json.loads(path.read_text())
    points = choose.parse_points(path.read_text(), content["for"])
    assert content["for"][1] == [2]
    assert {"mpi", "hierarchical", "leader"} <= set(points)
    for pairs in points.values():
        assert [nbytes for nbytes, _ in pairs] == [1024, 65536]
    content["points"] = {"mpi": [[1024, 1e-5], [65536, 9e-5]], "leader": [[1024, 2e-5], [65536, 8e-5]]}
    path.write_text(json.dumps(content))
    program = tmp_path / "chosen.py"
    program.write_text(CHOSEN)
    built_in = run_ranks(2, program).check().output.split()
    tuned = run_ranks(2, program, limit=60, MPISTRAT_TUNED="1").check().output.split()
    assert built_in == 2 * ["hierarchical,hierarchical"]
    assert tuned == 2 * ["mpi,leader"]


@pytest.mark.parametrize(
    "change",
    [
        {"format": 0},
        {"for": ["another", [2]]},
        {"points": {"mpi": [[1024, -1.0]]}},
        {"points": {"mpi": [[0, 1.0]]}},
        {"points": {"mpi": [[1024, float("inf")]]}},
        {"points": {"mpi": []}},
        {"points": {"mpi": [[1024]]}},
        {"points": []},
    ],
)
def test_costs_of_another_place_are_refused(change):
    content = {"format": 1, "for": ["Open MPI", [2]], "points": {"mpi": [[2048, 2e-5], [1024, 1e-5]]}}
    assert choose.parse_points(json.dumps(content), content["for"]) == {"mpi": [(1024, 1e-5), (2048, 2e-5)]}
    with pytest.raises(ValueError):
        choose.parse_points(json.dumps({**content, **change}), ["Open MPI", [2]])
