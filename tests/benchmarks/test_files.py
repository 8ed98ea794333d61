"""The benchmarks of files make their files once, and measure every way."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "files"
OURS = {"mpistrat", "mpistrat, prefetch(0)"}
KEPT = {"mpistrat", "mpistrat, manifest kept"}
BY_HAND = {"every rank opens all", "by hand, each its part"}
H5PY = {"h5py, slices", "h5py, read_direct", "raw read"}
PLAIN = ("contiguous", "chunks of 1 row", "chunks of 32 rows")


def rows_in(path, subject, n):
    """The rows of each case by their ways, which have the fields that the documentation names."""
    found = {}
    for row in json.loads(path.read_text()):
        assert list(row) == ["subject", "case", "way", "bytes", "seconds", "n"]
        assert (row["subject"], row["n"]) == (subject, n)
        assert row["seconds"] > 0 or row["case"] in ("memory", "opened")
        found.setdefault(row["case"], {})[row["way"]] = row
    return found


def times_of(folder):
    return {name: os.stat(folder / name).st_mtime_ns for name in os.listdir(folder)}


@pytest.mark.full
@pytest.mark.parametrize("n", [1, 3])
def test_files(run_alone, tmp_path, n):
    folder, rows = tmp_path / "data", tmp_path / "rows.json"
    arguments = [FOLDER / "files.py", "-n", str(n), "--data", folder, "--files", "40"]
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
        found = rows_in(rows, "files", n)
        assert {case: set(ways) for case, ways in found.items()} == {
            "start": KEPT | BY_HAND,
            "start, in collectives": KEPT,
            "opened": KEPT,
        }
        assert [found["opened"][way]["bytes"] for way in sorted(KEPT)] == [40, 0]
        assert os.listdir(folder) == ["files-40"]
        times = times_of(folder / "files-40")
        assert sorted(times) == [*(f"{i:07}.h5" for i in range(40)), "manifest.json"]
        assert before in (None, times)
        before = times


@pytest.mark.parametrize("n", [1, 2])
def test_checkpoint(run_ranks, tmp_path, n):
    folder, rows = tmp_path / "data", tmp_path / "rows.json"
    arguments = ["--here", "--data", folder, "--megabytes", "2", "--repetitions", "1", "--json", rows]
    ended = run_ranks(n, FOLDER / "checkpoint.py", *arguments, limit=200).check()
    ended.shows(f"checkpoint, {n} rank{'s' * (n > 1)}\n", "mpistrat takes")
    found = rows_in(rows, "checkpoint", n)
    assert {case: set(ways) for case, ways in found.items()} == {
        "save": {"mpistrat", "raw write and fsync", "h5py"},
        "load": {"mpistrat", "raw read", "h5py"},
        "training stands still": {"mpistrat", "save"},
    }
    assert {row["bytes"] for ways in found.values() for row in ways.values()} == {2_000_000}
    assert os.listdir(folder) == []


@pytest.mark.full
def test_input(run_alone, tmp_path):
    pytest.importorskip("hdf5plugin")
    folder, rows = tmp_path / "data", tmp_path / "rows.json"
    arguments = [FOLDER / "input.py", "--data", folder, "--mib", "2", "--repetitions", "1", "--no-torch"]
    ended = run_alone(*arguments, "--json", rows, limit=100).check()
    ended.shows("input, 1 rank\n", "torch is left out", "mpistrat takes")
    found = {case: set(ways) for case, ways in rows_in(rows, "input", 1).items()}
    memory = found.pop("memory", None)
    assert memory == ({"mpistrat", "raw read", "h5py, slices"} if sys.platform == "linux" else memory)
    warm = {case: ways for case, ways in found.items() if not case.endswith("cold")}
    computing = {*OURS, "computing alone", "reading alone"}
    assert warm == {
        **{f"{layout}, warm": OURS | H5PY for layout in PLAIN},
        **{f"{layout}, warm": {*OURS, "h5py, slices"} for layout in ("gzip", "zstd")},
        "first epoch": {"mpistrat", "mpistrat, shuffled"} | H5PY,
        "shuffled, warm": {"mpistrat", "in order", "raw read"},
        **{f"5 ms of computing a batch, {layout}": computing for layout in ("contiguous", "zstd")},
        **{f"an index of 10^{exponent}, shuffled": {"mpistrat"} for exponent in (6, 9, 12)},
    }
    cold = {case: ways for case, ways in found.items() if case.endswith("cold")}
    if cold:
        also = {"shuffled, cold": {"raw read"}}  # in order, which is compared with warm reads only
        assert cold == {case: found[case.replace("cold", "warm")] - also.get(case, set()) for case in cold}
        assert len(cold) == 4
    else:
        ended.shows("nothing is measured cold")
    times = times_of(folder)
    assert len(times) == 20
    run_alone(*arguments, limit=100).check()
    assert times_of(folder) == times
    ended = run_alone(*arguments, "--seed", "1")
    assert ended.status == 1
    ended.shows("choose another --data, or remove it")


def test_input_is_for_one_rank(run_ranks, tmp_path):
    ended = run_ranks(2, FOLDER / "input.py", "--data", tmp_path)
    assert ended.status not in (0, None)
    ended.shows("call it without a launcher")


def test_input_beside_torch(run_alone, tmp_path):
    pytest.importorskip("hdf5plugin")
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    rows = tmp_path / "rows.json"
    arguments = ["--data", tmp_path / "data", "--mib", "2", "--repetitions", "1", "--json", rows]
    run_alone(FOLDER / "input.py", *arguments, limit=100).check()
    found = rows_in(rows, "input", 1)
    loaders = {"DataLoader", "DataLoader, batched", "DataLoader, 2 workers"}
    assert loaders <= set(found["torch, in order"])
    assert loaders <= set(found["torch, shuffled"])
