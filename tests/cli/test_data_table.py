"""The table of `mpistrat data`: its columns, and the plural."""

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

from mpistrat.cli import commands


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
    assert lines[head + 1].split()[:6] == ["64", steps, "-", "-", many, "DATA"]
    assert lines[head + 2].split()[:6] == ["1", steps, steps, steps, steps, "DATA"]
    assert len({len(line) for line in lines[head : head + 3]}) == 1
    assert lines[head - 1].endswith("global batches of 1 row")
    assert lines[0].startswith(("1 file, ", "2 files, ")[files - 1])
    assert "1 byte per row" in result.output
