"""Training that saves every few steps, and may be killed: ``python killed_training.py FOLDER [KILL_STEP]``.

The weight is the sum of all rows used in training. The log of a rank lists its rows.
"""

import json
import os
import signal
import sys
from pathlib import Path

import mpistrat
from mpistrat.data import AutoShardPolicy, Dataset, Options
from mpistrat.process.files import appearing

EPOCHS, SAVE_EVERY = 3, 4
folder = Path(sys.argv[1])
kill = int(sys.argv[2]) if len(sys.argv) > 2 else None

strategy = mpistrat.MultiWorkerMirroredStrategy()
options = Options()
options.experimental_distribute.auto_shard_policy = AutoShardPolicy.DATA
rows = Dataset.from_hdf5(str(folder / "*.h5"), "x", manifest=folder / "manifest.json")
batch = 10 if kill is not None else 7
training = strategy.experimental_distribute_dataset(rows.shuffle().batch(batch).with_options(options))
with strategy.scope():
    weight = mpistrat.Variable(0.0, dtype="float64", name="weight", aggregation=mpistrat.VariableAggregation.SUM)

saved, step = folder / "saved.json", 0
state = {"epoch": 0}
if saved.exists():
    kept = json.loads(saved.read_text())
    state, step = kept["input"], kept["step"]
    training.restore(state)
    mpistrat.training.load([weight], folder / kept["weights"])
    assert float(weight.numpy()) == kept["weight"]

log = open(folder / f"run-{strategy.num_replicas_in_sync}-{strategy.comm.rank}.log", "w")  # noqa: SIM115


def train_step(x):
    weight.assign_add(float(x.sum()))


for epoch in range(state["epoch"], EPOCHS):
    iterator = iter(training)
    for x in iterator:
        if kill == step and strategy.comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        strategy.run(train_step, args=(x,))
        step += 1
        for number in x.tolist():
            log.write(f"{epoch} {step} {number:.0f}\n")
        log.flush()
        if step % SAVE_EVERY == 0:
            name = f"weights-{step}.weights"
            mpistrat.training.save([weight], folder / name)
            if strategy.is_chief:
                with appearing(saved, replace=True) as temporary:
                    Path(temporary).write_text(
                        json.dumps(
                            {"step": step, "weights": name, "weight": float(weight.numpy()), "input": iterator.state()}
                        )
                    )
log.close()
if strategy.is_chief:
    print("ends with", float(weight.numpy()), flush=True)
