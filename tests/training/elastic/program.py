"""A program that trains in an `ElasticLoop` and is killed: ``program.py DIRECTORY LOSSES``, under ``--elastic``.

LOSSES is JSON: for each run the place at which ranks end, the ranks, and how. It prints a digest of all that it has
computed, and how often each row was seen.
"""

import hashlib
import json
import os
import pathlib
import signal
import struct
import subprocess
import sys
import time

import numpy as np

import mpistrat
from mpistrat.data import Dataset
from mpistrat.training import elastic_copies as copies
from mpistrat.training.elastic_copies import MemoryCopies

RUN = int(os.environ.get("MPISTRAT_RESTART", "0"))
ROWS, EPOCHS, BATCH = 41, 3, 7  # 6 steps an epoch, the last of 6 rows: some replicas get none
losses = json.loads(sys.argv[2])
place, ranks, how = losses[RUN] if len(losses) > RUN else ("nowhere", [], "kill")


def lose(here, rank):
    """End this rank, if this is the place where it ends in this run."""
    if here != place or not (ranks == "all" or rank in ranks):
        return
    if "wait" in how:
        while len(found := waiting()) < 2:  # until the launcher of the next run has begun to start ranks
            time.sleep(0.02)
        if "next" in how:  # the next run is lost, too, while it waits
            os.kill(found[rank % 2], signal.SIGKILL)
        else:
            words = pathlib.Path(f"/proc/{found[0]}/cmdline").read_bytes().split(b"\0")
            folder = pathlib.Path(os.fsdecode(words[words.index(b"mpistrat.process.standby") + 1]))
            while len([*folder.glob("ready.*")]) < next_size():
                time.sleep(0.02)
    if "raise" in how:
        raise ValueError("on purpose")
    if how == "exit":
        os._exit(3)
    if how == "terminate":
        process = os.getppid()
        while b"mpistrat" not in pathlib.Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0"):
            process = int(pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(process, signal.SIGTERM)
        return
    if how == "hang":
        time.sleep(100)
    if how == "stop" or how.startswith("later"):  # the program goes on until the signal comes
        signals = f"kill -STOP {os.getpid()}; sleep 0.3; kill -CONT {os.getpid()}"
        if how != "stop":
            signals = f"sleep {how.split()[1]}; kill -KILL {os.getpid()}"
        subprocess.Popen(["/bin/sh", "-c", signals])
        return
    os.kill(os.getpid(), signal.SIGSEGV if how == "crash" else signal.SIGKILL)


def waiting():
    """Return the processes of the next run, which waits: its launcher, and the ranks that have started."""
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if os.fsencode(pathlib.Path(os.environ["MPISTRAT_ELASTIC"], "imports", str(RUN))) in words:
            found.append(int(process.name))
    return sorted(found)


def next_size():
    """Return the number of ranks of the next run."""
    size = int(os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("PMI_SIZE", "1")))
    return max(1, size - (os.environ["MPISTRAT_ELASTIC_RANKS"] == "fewer"))


rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
lose("start", rank)
strategy = mpistrat.MultiWorkerMirroredStrategy(virtual_replicas=None if how == "no replicas" else 4)
with strategy.scope():
    weights = mpistrat.Variable(np.linspace(0, 1, 5), name="weights")
    seen = mpistrat.Variable(
        np.zeros(ROWS),
        synchronization=mpistrat.VariableSynchronization.ON_READ,
        aggregation=mpistrat.VariableAggregation.SUM,
        name="seen",
    )
    optimizer = mpistrat.optimizers.Adam(0.05, global_clipnorm=1.0)
    optimizer.build([weights])  # a run that was lost after the last step makes none
    mean = mpistrat.metrics.Mean(name="mean")
x = np.random.default_rng(0).normal(size=(ROWS, 5))
rows = Dataset.from_arrays((np.arange(ROWS), x)).shuffle(ROWS, seed=3).batch(BATCH)
write = MemoryCopies.write


def lost_in_copy(self, step, arrays):
    """Write a copy, in which ranks end when the old one is gone, and the new one has no checksum yet."""
    if place == f"copy:{step}" and (ranks == "all" or rank in ranks):
        digest = copies.digest

        def lost_before(*content):
            copies.digest = digest
            lose(place, rank)
            return digest(*content)

        copies.digest = lost_before
    write(self, step, arrays)


MemoryCopies.write = lost_in_copy
lose("built", rank)


def step(numbers, values, rng):
    noise = rng.normal(size=len(values)) if len(values) else np.zeros(0)
    error = values @ weights.value() - 1 + 0.1 * noise
    optimizer.apply_gradients([(values.T @ error / BATCH, weights)])
    seen.assign_add(np.bincount(numbers, minlength=ROWS).astype(float))
    mean.update_state(error)


state = {"weights": weights, "seen": seen, "optimizer": optimizer, "mean": mean, "rng": strategy.rng(7)}


def by_loop():
    every = float(os.environ.get("EVERY", "600"))
    loop = mpistrat.experimental.ElasticLoop(rows, EPOCHS, sys.argv[1], every, copy_share=1, **state)
    lose("restored", rank)
    for batch in loop:
        lose(f"step:{loop.step}", rank)
        strategy.run(step, args=(*batch, state["rng"]))
        lose(f"end:{loop.step}", rank)
        if place == f"flip:{loop.step}" and rank in ranks:
            folder = pathlib.Path(os.environ["MPISTRAT_ELASTIC"], "0")
            newest = max(folder.glob("*.*.*"), key=lambda path: struct.unpack("<8sq", path.read_bytes()[:16])[1])
            with newest.open("r+b") as file:
                file.seek(200)
                byte = file.read(1)[0]
                file.seek(200)
                file.write(bytes([byte ^ 4]))
            lose(place, rank)
    if loop.copies():  # they are enough from here on
        assert not [*pathlib.Path(os.environ.get("MPISTRAT_ELASTIC", "none")).glob("*/restored-*")]
    return loop.step


def by_handler():
    """The handler of preemption, which takes a checkpoint."""
    batches, steps = strategy.experimental_distribute_dataset(rows), np.zeros(1, np.int64)
    checkpoint = mpistrat.training.Checkpoint(batches=batches, steps=steps, **state)
    handler = mpistrat.experimental.PreemptionCheckpointHandler(None, checkpoint, sys.argv[1])

    def counted(batch):
        strategy.run(step, args=(*batch, state["rng"]))
        steps[:] += 1

    for _ in range(batches.state()["epoch"], EPOCHS):
        for batch in batches:
            lose(f"step:{steps[0]}", rank)
            handler.run(counted, batch)
    return int(steps[0])


ended = by_handler() if os.environ.get("WAY") == "handler" else by_loop()
lose("after", rank)
digest = hashlib.md5(weights.numpy().tobytes())
for slot in optimizer.variables:
    digest.update(np.asarray(slot.numpy()).tobytes())
digest.update(np.float64(mean.result()).tobytes())
counts = {*seen.read_value().tolist()}
if rank == 0 and "children.py" in sys.orig_argv[1]:
    print("began by waiting", flush=True)
if rank == 0:
    print(f"{digest.hexdigest()} rows seen {counts} steps {ended}", flush=True)
