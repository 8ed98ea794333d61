"""The measurements run, agree with themselves and write what they say they do; how long they take is not tested."""

import json
import os
import re

import numpy as np
import pytest

from mpistrat.bench import step
from mpistrat.bench.measuring.report import Report

OURS = {"mpistrat", "mpistrat, plain arrays"}


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


def run_subject(run_alone, launcher, subject, path, *arguments):
    return run_program(run_alone, launcher, ["-m", f"mpistrat.bench.{subject}"], path, *arguments)


def run_program(run_alone, launcher, program, path, *arguments):
    return run_alone(*program, *launcher, "--json", path, *arguments, limit=100).check()


@pytest.mark.full
@pytest.mark.mpich
@pytest.mark.parametrize(("n", "momentum"), [(1, None), (2, None), (2, "0.9")])
def test_step(run_alone, launcher, tmp_path, n, momentum):
    path = tmp_path / "rows.json"
    options = [] if momentum is None else ["--momentum", momentum]
    ended = run_subject(run_alone, launcher, "step", path, "-n", str(n), "--repetitions", "2", *options)
    case = "sgd" if momentum is None else "sgd, momentum 0.9"
    rows = check_rows(path, "step", n, {case: OURS})
    assert {row["bytes"] for row in rows} == {4 * 1_863_690}
    ended.shows(f"step, {n} rank{'s' * (n > 1)}\n", "mpistrat takes")


def test_step_under_a_launcher(run_ranks, tmp_path):
    """Then it measures those ranks, and launches none."""
    path = tmp_path / "rows.json"
    ended = run_ranks(3, "-m", "mpistrat.bench.step", "--repetitions", "1", "--json", path, limit=100).check()
    check_rows(path, "step", 3, {"sgd": OURS})
    assert ended.output.count("mpistrat takes") == 1


def test_difference_finds_each_parameter():
    same = [np.ones(3), np.zeros((2, 2))]
    assert step.difference({"a": same, "b": [x + 1e-7 for x in same]}) is None
    assert "parameter 1 of b by up to 0.5" in step.difference({"a": same, "b": [same[0], same[1] + 0.5]})
    assert "parameter 0 of b" in step.difference({"a": same, "b": [same[0] * np.nan, same[1]]})


@pytest.mark.parametrize("arguments", [["-n", "0"], ["--repetitions", "x"], ["--momentum", "x"]])
def test_arguments_are_checked(run_alone, arguments):
    ended = run_alone("-m", "mpistrat.bench.step", *arguments)
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
