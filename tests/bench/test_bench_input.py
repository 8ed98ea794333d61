"""`mpistrat bench input` makes its files, measures every way, and says what it leaves out."""

import json
import os

import pytest

pytest.importorskip("hdf5plugin")

OURS = {"mpistrat", "mpistrat, prefetch(0)"}
PLAIN = ("contiguous", "chunks of 1 row", "chunks of 32 rows")


@pytest.mark.full
def test_input(run_alone, tmp_path):
    folder, rows = tmp_path / "data", tmp_path / "rows.json"
    arguments = [
        "-m",
        "mpistrat.bench.input",
        "--data",
        folder,
        "--mib",
        "2",
        "--repetitions",
        "1",
    ]
    ended = run_alone(*arguments, "--json", rows, limit=100).check()
    ended.shows("input, 1 rank\n", "mpistrat takes")
    found = {}
    for row in json.loads(rows.read_text()):
        assert list(row) == ["subject", "case", "way", "bytes", "seconds", "n"]
        found.setdefault(row["case"], set()).add(row["way"])
    warm = {case: ways for case, ways in found.items() if not case.endswith("cold")}
    computing = {*OURS, "computing alone", "reading alone"}
    assert warm == {
        **{f"{layout}, warm": {*OURS, "raw read"} for layout in PLAIN},
        **{f"{layout}, warm": OURS for layout in ("gzip", "zstd")},
        "first epoch": {"mpistrat", "mpistrat, shuffled", "raw read"},
        "shuffled, warm": {"mpistrat", "in order", "raw read"},
        **{f"5 ms of computing a batch, {layout}": computing for layout in ("contiguous", "zstd")},
    }
    cold = {case: ways for case, ways in found.items() if case.endswith("cold")}
    if cold:
        also = {"shuffled, cold": {"raw read"}}  # in order, which is compared with warm reads only
        assert cold == {case: found[case.replace("cold", "warm")] - also.get(case, set()) for case in cold}
        assert len(cold) == 4
    else:
        ended.shows("nothing is measured cold")
    assert len(os.listdir(folder)) == 20
    times = {name: os.stat(folder / name).st_mtime_ns for name in os.listdir(folder)}
    run_alone(*arguments, limit=100).check()
    assert {name: os.stat(folder / name).st_mtime_ns for name in os.listdir(folder)} == times
    ended = run_alone(*arguments, "--seed", "1")
    assert ended.status == 1
    ended.shows("choose another --data, or remove it")


def test_input_is_for_one_rank(run_ranks, tmp_path):
    ended = run_ranks(2, "-m", "mpistrat.bench.input", "--data", tmp_path)
    assert ended.status not in (0, None)
    ended.shows("call it without a launcher")
