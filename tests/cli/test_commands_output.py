"""What commands write: tables, `--json`, scripts for shells, and examples in their help."""

import json
import os
import shutil
import subprocess
import sys

import h5py
import numpy as np
import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from mpistrat.cli import COMMANDS, commands
from mpistrat.cli.bench import SUBJECTS


def invoke(*arguments):
    return CliRunner().invoke(commands, list(map(str, arguments)))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_with_which_a_shell_completes(shell):
    environ = {**os.environ, "_MPISTRAT_COMPLETE": f"{shell}_source"}
    command = [sys.executable, "-c", "from mpistrat.cli import main; main()"]
    script = subprocess.run(command, env=environ, capture_output=True, text=True).stdout
    assert f"_MPISTRAT_COMPLETE={shell}_complete" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_what_is_completed():
    def completed(*words, begun=""):
        shell = BashComplete(commands, {}, "mpistrat", "_MPISTRAT_COMPLETE")
        return {each.value for each in shell.get_completions(list(words), begun)}

    assert completed() == set(COMMANDS)
    assert completed(begun="ch") == {"check", "checkpoint"}
    assert "--dry-run" in completed("run", begun="--")
    assert completed("bench") == set(SUBJECTS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example(name):
    assert f"  mpistrat {name}" in invoke(name, "--help").output


def test_json_of_shard_and_hosts(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(10)
    result = invoke("shard", tmp_path / "a.h5", "-n", 2, "--out", tmp_path / "out", "--json")
    files = json.loads(result.output)["files"]
    assert [each["bytes"] > 0 for each in files] == [True, True]
    found = json.loads(invoke("hosts", "--no-mpi", "--json").output)
    assert found["problems"] == []
    assert found["facts"]["rank"]["value"] == 0


@pytest.mark.parametrize("files", [1, 2])
def test_columns_stay_apart(tmp_path, files):
    """Numbers of steps may be wider than their titles."""
    paths = [str(tmp_path / f"{i}.h5") for i in range(files)]
    for path in paths:
        with h5py.File(path, "w") as file:
            file["x"] = np.zeros((1_200_000, 1), np.uint8)
    options = ["--replicas", "64", "--replicas", "1", "--batch-size", "1"]
    result = CliRunner().invoke(commands, ["data", *paths, *options])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("replicas"))
    steps = f"{1_200_000 * files:,}"
    many = f"{1_200_000 * files * 64:,}"
    assert lines[head + 1].split()[:6] == ["64", steps, steps, "-", "-", many]
    assert lines[head + 2].split()[:6] == ["1", *[steps] * 5]
    assert len({len(line) for line in lines[head : head + 3]}) == 1
    assert lines[head - 1].endswith("global batches of 1 row")
    assert lines[0].startswith(("1 file, ", "2 files, ")[files - 1])
    assert "1 byte per row" in result.output
