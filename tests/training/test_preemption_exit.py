"""How programs end that were told to stop, as their launcher sees it."""

import re
import signal

import pytest

pytestmark = pytest.mark.mpich

TRAIN = """
import os, signal, sys
import numpy as np
import mpistrat
from mpistrat.experimental import PreemptionCheckpointHandler

folder, stop_at = sys.argv[1], int(sys.argv[2])
strategy = mpistrat.MultiWorkerMirroredStrategy()
rank = strategy.comm.rank
with strategy.scope():
    weight = mpistrat.Variable(np.ones(7), name="weight")
handler = PreemptionCheckpointHandler(strategy.cluster_resolver, [weight], folder)


def step(number):
    noise = np.random.default_rng([number, rank]).normal(size=7)
    weight.assign_sub(0.1 * strategy.reduce("MEAN", noise + np.asarray(weight), axis=None))


for number in range(handler.total_run_calls, 20):
    if number == stop_at and rank == strategy.num_replicas_in_sync - 1:
        os.kill(os.getpid(), signal.SIGUSR2)
    handler.run(step, number)
if strategy.is_chief:
    print("final loss", float(np.square(weight).sum()).hex())
"""

ENDED = """
import os, signal
from mpistrat.experimental import PreemptionWatcher

watcher = PreemptionWatcher()
os.kill(os.getpid(), signal.SIGTERM)
print(watcher.preemption_message, flush=True)
del watcher
os.kill(os.getpid(), signal.SIGTERM)
print("still there", flush=True)
"""


def test_stopped_and_resumed(run_ranks, tmp_path):
    """The same final loss, to the last bit."""
    program = tmp_path / "train.py"
    program.write_text(TRAIN)

    def run(folder, stop_at):
        return run_ranks(3, program, tmp_path / folder, stop_at, SLURM_JOB_ID="", SLURM_JOBID="")

    undisturbed = re.search(r"final loss (\S+)", run("undisturbed", -1).check().output)[1]
    stopped = run("stopped", 11)
    assert stopped.status == 42, str(stopped)
    stopped.shows("rank 2 was told to stop (SIGUSR2 at", "all 3 ranks saved after run 11", "not a Slurm job")
    assert "final loss" not in stopped.output
    resumed = run("stopped", 11 + 20).check()
    resumed.shows("continuing after run 11", f"final loss {undisturbed}")


def test_signals_end_a_program_that_has_no_watcher_any_more(run_alone):
    ended = run_alone("-c", ENDED)
    assert ended.status == -signal.SIGTERM, str(ended)
    ended.shows("SIGTERM at ")
    assert "still there" not in ended.output
