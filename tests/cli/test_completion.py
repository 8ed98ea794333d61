"""`mpistrat completion`, `--json`, and examples in the help of commands."""

import json
import shutil
import subprocess

import h5py
import numpy as np
import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from mpistrat.cli import COMMANDS, commands


def invoke(*arguments):
    return CliRunner().invoke(commands, list(map(str, arguments)))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script(shell):
    result = invoke("completion", shell)
    assert result.exit_code == 0
    assert f"_MPISTRAT_COMPLETE={shell}_complete" in result.output
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=result.output, text=True, check=True)


def test_what_is_completed(monkeypatch):
    def completed(*words, begun=""):
        shell = BashComplete(commands, {}, "mpistrat", "_MPISTRAT_COMPLETE")
        return {each.value for each in shell.get_completions(list(words), begun)}

    assert completed() == set(COMMANDS)
    assert completed(begun="co") == {"completion"}
    assert "--dry-run" in completed("run", begun="--")
    assert completed("completion") == {"bash", "zsh", "fish"}


def test_another_shell_is_refused():
    assert invoke("completion", "tcsh").exit_code == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example(name):
    assert f"  mpistrat {name}" in invoke(name, "--help").output.replace('eval "$(', "  ")


def test_json_of_shard_and_hosts(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(10)
    result = invoke("shard", tmp_path / "a.h5", "-n", 2, "--out", tmp_path / "out", "--json")
    files = json.loads(result.output)["files"]
    assert [each["bytes"] > 0 for each in files] == [True, True]
    found = json.loads(invoke("hosts", "--no-mpi", "--json").output)
    assert found["problems"] == []
    assert found["facts"]["rank"]["value"] == 0
