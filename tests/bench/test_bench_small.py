"""`mpistrat bench small` alone: the library without rivals."""

import json

import pytest


@pytest.mark.full
@pytest.mark.mpich
def test_small(run_ranks, tmp_path):
    path = tmp_path / "rows.json"
    arguments = ["--repetitions", "1", "--epochs", "1", "--inner", "1", "--json", path]
    ended = run_ranks(2, "-m", "mpistrat.bench.small", *arguments, limit=100).check()
    ended.shows("small, 2 ranks\n")
    rows = json.loads(path.read_text())
    assert {row["way"] for row in rows} == {"mpistrat"}
    cases = [row["case"] for row in rows]
    assert len(cases) == len(set(cases)) == 24
    assert all(row["seconds"] > 0 for row in rows)
