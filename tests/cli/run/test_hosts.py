"""The hosts of ``mpistrat run --elastic``: what it refuses, and on which its ranks are. tests/cluster loses some."""

import pytest
from click.testing import CliRunner

from mpistrat.cli import commands
from mpistrat.cli.run.hosts import dealt


def run(tmp_path, *arguments):
    (tmp_path / "x.py").touch()
    return CliRunner().invoke(commands, ["run", *arguments, str(tmp_path / "x.py")])


@pytest.mark.parametrize("text", ["a", "a:", ":2", "a:0", "a:2,", "a:x"])
def test_hosts_need_numbers_of_ranks(tmp_path, text):
    ended = run(tmp_path, "--elastic", "--hosts", text)
    assert ended.exit_code == 2
    assert f"--hosts {text}: give hosts with their numbers of ranks, as in node1:4,node2:4" in ended.output


@pytest.mark.parametrize("options", [[], ["--elastic", "-n", "2"], ["--elastic", "--standby"], ["--elastic", "--tag"]])
def test_hosts_need_elastic_alone(tmp_path, options):
    ended = run(tmp_path, "--hosts", "a:2", *options)
    assert ended.exit_code == 2
    assert "--hosts needs --elastic, and no -n" in " ".join(ended.output.split())


@pytest.mark.parametrize(
    ("hosts", "ranks", "expected"),
    [
        ({"a": 2, "b": 2}, 4, {"a": 2, "b": 2}),
        ({"a": 1, "b": 3}, 4, {"a": 1, "b": 3}),
        ({"a": 2, "b": 2}, 3, {"a": 2, "b": 1}),
        ({"a": 2, "b": 2, "c": 2}, 8, {"a": 3, "b": 3, "c": 2}),
        ({"a": 1, "b": 1}, 1, {"a": 1}),
        ({}, 4, {}),
    ],
)
def test_ranks_are_dealt_to_the_hosts_that_are_left(hosts, ranks, expected):
    assert dealt(hosts, ranks) == expected
