"""`mpistrat bench files` makes its files once, opens each once for the whole job, and none with a manifest."""

import json
import os

import pytest

OURS = {"mpistrat", "mpistrat, manifest kept"}


@pytest.mark.full
@pytest.mark.parametrize("n", [1, 3])
def test_files(run_alone, tmp_path, n):
    folder, rows = tmp_path / "data", tmp_path / "rows.json"
    arguments = ["-m", "mpistrat", "bench", "files", "-n", str(n), "--data", folder, "--files", "40"]
    arguments += ["--repetitions", "1", "--json", rows]
    before = None
    for _ in range(2):
        ended = run_alone(*arguments, limit=100).check()
        ended.shows(
            f"files, {n} rank",
            f"mpistrat: 40 opens of 40 files by {n} ranks together, ",
            f"mpistrat, manifest kept: 0 opens of 40 files by {n} ranks together, ",
            "% of the start in collectives",
        )
        found = {}
        for row in json.loads(rows.read_text()):
            assert list(row) == ["subject", "case", "way", "bytes", "seconds", "n"]
            assert (row["subject"], row["n"]) == ("files", n)
            found.setdefault(row["case"], {})[row["way"]] = row
        assert set(found) == {"start", "start, in collectives", "opened"}
        assert set(found["start"]) == OURS
        assert set(found["start, in collectives"]) == set(found["opened"]) == OURS
        assert [found["opened"][way]["bytes"] for way in sorted(OURS)] == [40, 0]
        assert all(
            row["seconds"] > 0 for case in ("start", "start, in collectives") for row in found[case].values()
        )
        inside = folder / "files-40"
        assert os.listdir(folder) == ["files-40"]
        assert sorted(os.listdir(inside)) == [*(f"{i:07}.h5" for i in range(40)), "manifest.json"]
        times = {name: os.stat(inside / name).st_mtime_ns for name in os.listdir(inside)}
        assert before in (None, times)
        before = times
