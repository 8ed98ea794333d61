"""``mpistrat top`` and ``mpistrat trace`` on a job of eight ranks on three nodes."""

import json
import shutil
import sys

import pytest
from click.testing import CliRunner
from jobs import unstuck
from trace_format import Merged

from mpistrat.cli import commands

pytestmark = [pytest.mark.timeout(900), pytest.mark.mpich]

PROGRAM = """
import os, sys, time
import numpy as np
import mpistrat
strategy = mpistrat.MultiWorkerMirroredStrategy()
rank = strategy.comm.rank
rows = mpistrat.data.Dataset.from_arrays(np.arange(6400.0)).batch(64)
batches = iter(strategy.experimental_distribute_dataset(rows))
for _ in range(20):
    batch = next(batches)
    strategy.run(lambda: mpistrat.get_replica_context().all_reduce("SUM", [np.ones(100_000), np.ones(10)]))
    strategy.barrier()
if rank == 0:
    print("ready", flush=True)
while strategy.agree(not os.path.exists(sys.argv[1])):
    time.sleep(0.1 + 0.1 * (rank == 5))
"""


def test_a_job_is_watched_and_traced(cluster, submit, environ, plugin, tmp_path, record_seconds):
    program, stop, traces = tmp_path / "program.py", tmp_path / "stop", tmp_path / "traces"
    program.write_text(PROGRAM)
    words = ["--wrap", f"srun --mpi={plugin} {sys.executable} {program} {stop}"]

    def start():
        shutil.rmtree(traces, ignore_errors=True)
        return submit("--nodes=3", "--ntasks=8", "--ntasks-per-node=3", *words, MPISTRAT_TRACE=str(traces))

    def top(*arguments):
        command = [sys.executable, "-m", "mpistrat", "top", *arguments]
        return cluster.run(*command, cwd=tmp_path, **environ, OMP_NUM_THREADS="1")

    job = unstuck(start, "its steps", lambda job: "ready" in job.output)
    try:
        with record_seconds("mpistrat top of a job of 8 ranks on three nodes"):
            ended = top("--json", job.number)
        assert ended.returncode == 0, ended.stdout
        line = next(line for line in ended.stdout.splitlines() if line.startswith("[{"))
        rows = json.loads(line)
        assert [row["rank"] for row in rows] == list(range(8)), ended.stdout
        assert len({row["host"] for row in rows}) == 3
        assert {row["job"] for row in rows} == {job.number}
        assert all(row["step"] >= 19 for row in rows)
        ended = top("--stacks", job.number)
        assert ended.returncode == 0, ended.stdout
        for host in {row["host"] for row in rows}:
            assert f"on {host}:" in ended.stdout
        assert "program.py" in ended.stdout
        assert "step time" in top("--once", job.number).stdout
    finally:
        stop.write_text("")
        job.wait_until("its end", job.is_over)
    ended = top("--json", job.number)
    assert ended.returncode == 1
    assert f"no rank of job {job.number} was found" in ended.stdout
    merge = CliRunner().invoke(commands, ["trace", str(traces), "-o", str(tmp_path / "out.json.gz")])
    assert merge.exit_code == 0, merge.output
    assert "warning" not in merge.output
    merged = Merged(tmp_path / "out.json.gz")
    assert sorted(merged.ranks) == list(range(8))
    assert len({node for node, _ in merged.ranks.values()}) == 3
    assert all(len(events) == 8 for events in merged.flows.values())
    merged.check_clocks(most=50)
