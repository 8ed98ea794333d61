"""`mpistrat run --output`: a file for each rank."""

import pytest
from click.testing import CliRunner

from mpistrat.cli import commands

PROGRAM = """
import sys
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
print("out", rank, sys.stdout.isatty(), flush=True)
print("err", rank, file=sys.stderr)
MPI.COMM_WORLD.Barrier()
sys.exit(3 if rank == 1 else 0)
"""


@pytest.mark.full
@pytest.mark.mpich
def test_a_file_for_each_rank(run_alone, tmp_path):
    (tmp_path / "prog.py").write_text(PROGRAM)
    logs = tmp_path / "some logs"
    output = ("--output", f"{logs}/of %(rank)d.txt")
    ended = run_alone("-m", "mpistrat", "run", "-n", "2", *output, tmp_path / "prog.py")
    assert ended.status == 3
    assert "out" not in ended.output.split()
    assert sorted(path.name for path in logs.iterdir()) == ["of 0.txt", "of 1.txt"]
    for rank in range(2):
        lines = (logs / f"of {rank}.txt").read_text().splitlines()
        assert {f"out {rank} False", f"err {rank}"} <= set(lines)


@pytest.mark.parametrize("output", ["log", "log.%d", "log.%(rank)d.%(rank)d", "log.%(rank)d.%s"])
def test_other_patterns_are_refused(tmp_path, output):
    (tmp_path / "x.py").touch()
    result = CliRunner().invoke(commands, ["run", "--output", output, "--dry-run", str(tmp_path / "x.py")])
    assert result.exit_code == 2
    assert "give one %(rank)d" in result.output
