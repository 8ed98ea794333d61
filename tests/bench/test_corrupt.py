"""`mpistrat bench corrupt` flips a bit in a program, and says whether it was found."""

import re

import pytest

from mpistrat.bench import corrupt

PROGRAM = """
import sys
import numpy as np, mpistrat
from mpistrat import training

virtual = {"virtual_replicas": 4} if "virtual" in sys.argv else {}
strategy = mpistrat.MultiWorkerMirroredStrategy(**virtual)
with strategy.scope():
    weights = [mpistrat.Variable(np.ones(shape), name=f"w{len(shape)}") for shape in [(20, 30), (30,)]]
    optimizer = mpistrat.optimizers.Adam(0.01)
rng = np.random.default_rng(strategy.comm.rank)
for _ in range(8):
    gradients = [rng.normal(size=w.shape) for w in weights]
    strategy.run(lambda: optimizer.apply_gradients(zip(gradients, weights)))
if "save" in sys.argv:
    training.save(weights, sys.argv[1])
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.mark.parametrize(
    ("kind", "arguments", "texts"),
    [
        ("weight", (), (r"'w[12]' \[", "FOUND", "CorruptionError: rank .*variable 'w")),
        ("weight", ("save",), (r"'w[12]' \[", "FOUND after", "is not the same on all ranks")),
        ("slot", ("virtual",), ("'Adam/", "FOUND", "CorruptionError: ")),
        ("result", (), (r"array 0 of 1 \[|array \d of 2 \[", "FOUND", "CorruptionError: ")),
    ],
)
def test_a_bit_that_is_found(run_ranks, program, tmp_path, kind, arguments, texts):
    arguments = ["--kind", kind, "--within", "5", "--seed", "7", program, tmp_path / "file.h5", *arguments]
    ended = run_ranks(3, "-m", "mpistrat.bench.corrupt", *arguments).check()
    (line,) = [line for line in ended.output.splitlines() if line.startswith("corrupt: ")]
    rank = re.match(rf"corrupt: --kind {kind} --within 5 --seed 7: rank (\d): ", line)[1]
    assert [text for text in texts if not re.search(text, line)] == []
    assert "NOT" not in line
    assert f"rank {rank} (" in line  # the error names it
    assert not (tmp_path / "file.h5").exists()


@pytest.mark.parametrize("virtual", [(), ("virtual",)])
def test_what_is_not_covered(run_ranks, program, virtual):
    ended = run_ranks(2, "-m", "mpistrat.bench.corrupt", "--kind", "gradient", "--within", "5", program, *virtual)
    assert ended.status == 1
    ended.shows("NOT FOUND after", "this is not covered")


def test_no_bit_is_flipped(run_ranks, run_alone, program):
    ended = run_ranks(2, "-m", "mpistrat.bench.corrupt", "--within", "1000000", "--seed", "1", program)
    assert ended.status == 1
    ended.shows("no bit was flipped: number ", "and the program made ", "give a smaller --within")
    ended = run_alone("-m", "mpistrat.bench.corrupt", "--here", program)
    assert (ended.status, "one rank has no other" in ended.output) == (1, True)


def test_an_error_of_the_program_is_shown(run_ranks, tmp_path):
    (tmp_path / "fails.py").write_text("import sys\nsys.exit(sys.argv[1])\n")
    ended = run_ranks(2, "-m", "mpistrat.bench.corrupt", tmp_path / "fails.py", "no such file")
    assert ended.status == 1
    ended.shows("no such file")


def test_kinds_are_checked(capsys):
    with pytest.raises(SystemExit):
        corrupt.main(["--kind", "wait", "program.py"])
    assert "invalid choice: 'wait'" in capsys.readouterr().err
