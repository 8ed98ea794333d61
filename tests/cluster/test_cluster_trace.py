"""A trace of eight ranks on four nodes, two of which have clocks of their own."""

import json

import pytest
from click.testing import CliRunner
from trace_format import Merged

from mpistrat.cli import commands, trace_files

pytestmark = pytest.mark.timeout(900)
AHEAD = {"node1": 1000, "node3": 3000}  # seconds
PROGRAM = f"""
import os, sys
ahead = {AHEAD!r}.get(os.uname().nodename)
if ahead and "AHEAD" not in os.environ:
    os.environ["AHEAD"] = "1"
    os.execvp("unshare", ["unshare", "--time", "--monotonic", str(ahead), "--fork", sys.executable, *sys.argv])
import numpy as np
import mpistrat
strategy = mpistrat.MultiWorkerMirroredStrategy()
arrays = [np.ones(100_000, np.float32), np.ones(10, np.float32)]
for _ in range(50):
    strategy.run(lambda: mpistrat.get_replica_context().all_reduce("SUM", arrays))
    strategy.barrier()
"""


@pytest.fixture(scope="module")
def traces(cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("traced")
    (folder / "program.py").write_text(PROGRAM)
    status, output = cluster.run((2, 2, 2, 2), folder / "program.py", MPISTRAT_TRACE=str(folder / "traces"))
    assert status == 0, output
    return folder / "traces"


def test_the_merged_trace(traces, tmp_path):
    ended = CliRunner().invoke(commands, ["trace", str(traces), "-o", str(tmp_path / "out.json.gz")])
    assert ended.exit_code == 0, ended.output
    assert "warning" not in ended.output
    merged = Merged(tmp_path / "out.json.gz")
    nodes = [merged.ranks[rank][0] for rank in range(8)]
    assert nodes == [1, 1, 2, 3, 4, 4, 5, 6]  # ranks with a clock of their own are shown apart
    assert len(merged.flows) >= 100
    assert all(len(events) == 8 for events in merged.flows.values())
    # The times of two ranks with clocks of their own may each be off by as much as the trace says.
    ended = CliRunner().invoke(commands, ["trace", str(traces), "--json"])
    assert ended.exit_code == 0, ended.output
    merged.check_clocks(most=50 + 2e6 * json.loads(ended.output)["clock_error_seconds"])


def test_what_the_clocks_are_ahead(traces):
    """By as much as the nodes were given, and as exactly as the trace says."""
    found, _ = trace_files.traces(traces)
    (job,) = trace_files.jobs(found)
    clocks, problems = trace_files.aligned(job)
    assert problems == []
    for trace, clock in clocks.items():
        error = abs(clock.ahead + AHEAD.get(trace.host, 0)).max()
        print(f"rank {trace.rank}: off by {error * 1e6:.1f} us, by its own account {clock.error * 1e6:.1f} us")
        assert error <= clock.error + 1e-9
