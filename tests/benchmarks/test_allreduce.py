"""`benchmarks/communication/allreduce.py` measures what it says, of sums that are right."""

import json
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "communication"
PROGRAM = FOLDER / "allreduce.py"
BY_HAND = {"one call", "4 MiB pieces", "not blocking"}
PLAIN = {"mpistrat", "mpistrat, hierarchical", "mpistrat, mpi", *BY_HAND}
BUFFER = {"mpistrat", "mpistrat, hierarchical", "4 MiB pieces, in place", *BY_HAND}


@pytest.mark.mpich
def test_allreduce(run_ranks, tmp_path):
    rows = tmp_path / "rows.json"
    arguments = ["--sizes", "100B,1MiB", "--repetitions", "1", "--seconds", "0.1", "--wire", "1gbit"]
    arguments += ["--algorithm", "hierarchical", "--algorithm", "mpi", "--json", rows]
    ended = run_ranks(2, PROGRAM, *arguments, limit=100).check()
    ended.shows("allreduce, 2 ranks\n", "mpistrat takes")
    found = {}
    for row in json.loads(rows.read_text()):
        assert list(row) == ["subject", "case", "way", "bytes", "seconds", "n"]
        assert (row["subject"], row["n"]) == ("allreduce", 2)
        assert row["seconds"] > 0
        found.setdefault((row["case"], row["bytes"]), []).append(row["way"])
        if row["way"] == "the wire":
            assert row["seconds"] == pytest.approx(row["bytes"] / 125e6)
    ways = {"plain array": PLAIN, "buffer": BUFFER, "bound": {"a copy in memory", "the wire"}}
    assert {key: set(value) for key, value in found.items()} == {
        (case, nbytes): ways[case] for case in ways for nbytes in (100, 1 << 20)
    }
    assert sum(map(len, found.values())) == sum(map(len, (*ways.values(), *ways.values())))


def test_unknown_algorithm(run_alone):
    ended = run_alone(PROGRAM, "--here", "--algorithm", "no such")
    assert ended.status not in (0, None)
    ended.shows("'no such' is not an all-reduce algorithm: use one of ")


@pytest.mark.parametrize("text", ["1", "0gbit", "fast"])
def test_rate(run_alone, text):
    ended = run_alone(PROGRAM, "--here", "--wire", text)
    assert ended.status == 2
    ended.shows("argument --wire: must be bits per second")


def test_least_bytes():
    least_bytes = runpy.run_path(str(FOLDER / "array_ways.py"))["least_bytes"]
    assert least_bytes((2,), 100) == 100
    assert least_bytes((4,), 100) == 150
    assert least_bytes((2, 2), 100) == 100
    assert least_bytes((3, 1, 2), 300) == 400
