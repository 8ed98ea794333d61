"""The programs in ``docs/examples`` do what their first lines say, on any number of ranks."""

import json
import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
RESULT = re.compile(r"test accuracy (0\.\d{3})  360 images  (\d) replicas  \d+\.\d s")

# Runs the main job as it is, and then every rank tells the bits of its weights.
WITH_BITS = f"""
import hashlib, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import train_digits
variables = train_digits.train(train_digits.parse())
bits = b"".join(variable.read_value().tobytes() for variable in variables)
sys.stdout.write(f"bits {{hashlib.sha256(bits).hexdigest()}}\\n")
"""


def results(ended):
    """Accuracy and number of replicas of each line that reports them."""
    return [match.groups() for line in ended.output.splitlines() if (match := RESULT.fullmatch(line))]


@pytest.mark.timeout(900)
def test_digits_train_alike_on_any_number_of_ranks(run_ranks, tmp_path):
    program = tmp_path / "with_bits.py"
    program.write_text(WITH_BITS)
    losses = {}
    for n in (1, 2, 3):
        out = tmp_path / f"out{n}"
        options = ("--dtype=float64", "--epochs=4", "--data-dir", tmp_path / "data", "--out", out)
        ended = run_ranks(n, program, *options, limit=200).check()
        assert [replicas for _, replicas in results(ended)] == [str(n)], str(ended)
        bits = re.findall(r"^bits (\w+)$", ended.output, re.MULTILINE)
        assert len(bits) == n, str(ended)
        assert len(set(bits)) == 1, f"the ranks have different weights:\n{ended}"
        assert (out / "weights.h5").stat().st_size > 0
        assert (out / "history.png").read_bytes().startswith(b"\x89PNG")
        losses[n] = json.loads((out / "history.json").read_text())["loss"]
    assert losses[1][-1] < 0.3 < losses[1][0]
    for n in (2, 3):
        assert losses[n] == pytest.approx(losses[1], rel=1e-9, abs=0), f"{n} ranks"


@pytest.mark.timeout(900)
def test_digits_have_the_same_bits_by_virtual_replicas(run_ranks, tmp_path):
    program, found = tmp_path / "with_bits.py", set()
    program.write_text(WITH_BITS)
    for n in (1, 3):
        options = ("--virtual-replicas=6", "--epochs=1", "--data-dir", tmp_path / "data", "--out", tmp_path / f"out{n}")
        ended = run_ranks(n, program, *options, limit=200, OPENBLAS_NUM_THREADS="1").check()
        assert [replicas for _, replicas in results(ended)] == ["6"], str(ended)
        found |= {*re.findall(r"^bits (\w+)$", ended.output, re.MULTILINE)}
    assert len(found) == 1


@pytest.mark.mpich
def test_digits_are_recognised(run_ranks, tmp_path):
    ended = run_ranks(4, EXAMPLES / "train_digits.py", limit=100, cwd=tmp_path).check()
    ((accuracy, replicas),) = results(ended)
    assert replicas == "4"
    assert float(accuracy) >= 0.96
    assert RESULT.fullmatch(ended.output.splitlines()[-1]), str(ended)


@pytest.mark.full
def test_digits_are_written_once_and_whole(tmp_path):
    example = runpy.run_path(str(EXAMPLES / "train_digits.py"))
    files = {tmp_path / name: rows for name, rows in example["FILES"].items()}
    assert not any(example["is_complete"](path, rows) for path, rows in files.items())
    example["write_digits"](tmp_path)
    assert all(example["is_complete"](path, rows) for path, rows in files.items())
    assert sorted(tmp_path.iterdir()) == sorted(files)
    path, rows = files.popitem()
    path.write_bytes(path.read_bytes()[:-1000])
    assert not example["is_complete"](path, rows)


@pytest.mark.mpich
def test_statistics_are_those_of_numpy(run_ranks, tmp_path):
    outputs = []
    for n in (1, 3):
        program = EXAMPLES / "hdf5_statistics.py"
        ended = run_ranks(n, program, "--check", limit=120, cwd=tmp_path).check()
        ended.shows("434271 values: mean 281.6581, standard deviation 10.087824\n", "as NumPy says")
        outputs.append(ended.output)
    assert outputs[0] == outputs[1]
