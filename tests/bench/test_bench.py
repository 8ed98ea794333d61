"""The measurements run, agree with themselves and write what they say they do; how long they take is not tested."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "shared"))

from reporting import Report


@pytest.fixture
def launcher():
    """Arguments that make a subject launch its ranks as the tests do."""
    command = os.environ.get("MPISTRAT_TEST_LAUNCHER")
    return [] if command is None else ["--launcher", command]


def check_rows(path, subject, n, expected):
    """The file has exactly these cases and ways, and the fields that the documentation names."""
    rows = json.loads(path.read_text())
    for row in rows:
        assert list(row) == ["subject", "case", "way", "bytes", "seconds", "n"]
        assert (row["subject"], row["n"]) == (subject, n)
        assert isinstance(row["bytes"], int)
        if row["case"] == "memory":
            assert row["seconds"] == 0.0
            assert row["bytes"] > 1 << 20
        else:
            assert row["seconds"] > 0
    found = {}
    for row in rows:
        found.setdefault(row["case"], []).append(row["way"])
    assert {case: set(ways) for case, ways in found.items()} == expected
    assert sum(map(len, found.values())) == len(rows)
    return rows


def run_program(run_alone, launcher, program, path, *arguments):
    return run_alone(*program, *launcher, "--json", path, *arguments, limit=100).check()


@pytest.mark.parametrize("arguments", [["-n", "0"], ["--repetitions", "x"], ["--seconds", "x"]])
def test_arguments_are_checked(run_alone, arguments):
    ended = run_alone("-m", "mpistrat.bench.tune", *arguments)
    assert ended.status == 2
    assert re.search(rf"argument {arguments[0]}: .*{arguments[1]}", ended.output)


def test_table_compares_with_the_row_of_the_same_case_and_size():
    report = Report("step", 1)
    report.add("a", "mpistrat", 8, 2e-6)
    report.add("a", "by hand", 8, 4e-6)
    report.add("b", "by hand", 8, 1.0)
    report.add("memory", "mpistrat", 3 << 20, 0.0)
    report.add("memory", "by hand", 2 << 20, 0.0)
    lines = [re.split(r"  +", line) for line in report.table().splitlines()]
    assert lines[0] == ["step, 1 rank"]
    assert lines[3] == ["a", "8", "by hand", "4.00 us", "0.50 x, -2.00 us"]
    assert lines[4] == ["b", "8", "by hand", "1.00 s"]
    assert lines[6] == ["memory", "by hand", "2.0 MiB", "1.50 x, +1.0 MiB"]


def test_table_groups_cases():
    report = Report("step", 1)
    for way in ("mpistrat", "by hand"):
        for nbytes in (8, 16):
            report.add("a", way, nbytes, 1.0)
    lines = [re.split(r"  +", line)[1:3] for line in report.table().splitlines()[2:]]
    assert lines == [["8", "mpistrat"], ["8", "by hand"], ["16", "mpistrat"], ["16", "by hand"]]
