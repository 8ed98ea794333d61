"""`mpistrat bench checkpoint` measures every way, and leaves nothing behind."""

import json
import os

import pytest


@pytest.mark.parametrize("n", [1, 2])
def test_checkpoint(run_ranks, tmp_path, n):
    folder, rows = tmp_path / "data", tmp_path / "rows.json"
    ended = run_ranks(
        n,
        *("-m", "mpistrat.bench.checkpoint", "--here", "--data", folder, "--megabytes", "2"),
        *("--repetitions", "1", "--json", rows),
        limit=200,
    ).check()
    ended.shows(f"checkpoint, {n} rank{'s' * (n > 1)}\n", "mpistrat takes")
    found = {}
    for row in json.loads(rows.read_text()):
        assert list(row) == ["subject", "case", "way", "bytes", "seconds", "n"]
        assert row["bytes"] == 2_000_000
        assert row["seconds"] > 0
        found.setdefault(row["case"], set()).add(row["way"])
    assert found == {
        "save": {"mpistrat", "raw write and fsync"},
        "load": {"mpistrat", "raw read"},
        "training stands still": {"mpistrat", "save"},
    }
    assert os.listdir(folder) == []
