"""Train as train_digits.py does, in a job that may be ended at any time and goes on where it was.

    sbatch slurm/requeue.sbatch
    mpistrat run -n 4 docs/examples/resume_digits.py

A signal (SIGUSR1, SIGUSR2, SIGTERM) makes all ranks save after the same step and leave; under SLURM the job is
put back into the queue. Started again, the program goes on with the next batch of the same epoch, and the
weights at the end are those of a run without interruption.
"""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import train_digits as digits

import mpistrat


def train(options):
    """Train on all ranks; returns the mean loss over the training data."""
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    data_dir, checkpoints = options.out / "data", options.out / "checkpoint"
    with strategy.chief_first() as first:
        if first and not all(digits.is_complete(data_dir / name, rows) for name, rows in digits.FILES.items()):
            digits.write_digits(data_dir)

    def scaled(images, labels):
        return images.reshape(len(images), 64).astype(options.dtype) / 16, labels

    with strategy.scope():
        initial = digits.initial_weights(options.seed, options.dtype)
        variables = [mpistrat.Variable(value, name=name) for name, value in initial]
        optimizer = mpistrat.optimizers.Adam(0.003)
    optimizer.build(variables)  # what it remembers belongs to the checkpoint, and has to exist to be restored

    # The variables have the values of the checkpoint now, if there is one.
    handler = mpistrat.experimental.PreemptionCheckpointHandler(None, [*variables, *optimizer.variables], checkpoints)
    done = handler.total_run_calls
    if strategy.is_chief:
        print(f"starts with step {done}", flush=True)

    # The batches of all epochs as one sequence: its beginning is skipped, not read.
    # Divided by rows they are the same for any number of replicas, which may be another one in the next run.
    divided = mpistrat.data.Options()
    divided.experimental_distribute.auto_shard_policy = mpistrat.data.AutoShardPolicy.DATA
    data = mpistrat.data.Dataset.from_hdf5(data_dir / "train-*.h5", ("images", "labels"))
    data = data.with_options(divided)
    batches = data.shuffle(seed=options.seed).batch(options.batch_size).map(scaled).repeat(options.epochs)

    def train_step(batch):
        images, labels = batch
        _, gradients = digits.loss_and_gradients([np.asarray(v) for v in variables], images, labels)
        examples = int(mpistrat.get_replica_context().all_reduce("SUM", len(labels)))
        optimizer.apply_gradients(zip([g / examples for g in gradients], variables, strict=True))

    for batch in strategy.experimental_distribute_dataset(batches.skip(done)):
        handler.run(strategy.run, train_step, (batch,))

    def loss_of(batch):
        images, labels = batch
        loss, _ = digits.loss_and_gradients([np.asarray(v) for v in variables], images, labels)
        return loss, len(labels)

    everything = strategy.experimental_distribute_dataset(data.batch(options.batch_size).map(scaled))
    parts = np.array([strategy.run(loss_of, (batch,)) for batch in everything])
    loss, examples = strategy.reduce("SUM", parts, axis=0)
    mpistrat.training.save(variables, options.out / "weights.h5")
    if strategy.is_chief:
        result = {"loss": float(loss / examples), "steps": handler.total_run_calls}
        (options.out / "result.json").write_text(json.dumps(result) + "\n")
        shutil.rmtree(checkpoints, ignore_errors=True)  # the next run starts afresh
        print(f"loss {loss / examples:.9f} after {handler.total_run_calls} steps", flush=True)
    return loss / examples


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=20, help="(default: 20)")
    parser.add_argument("--batch-size", type=int, default=128, help="of the global batch (default: 128)")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the images")
    parser.add_argument("--out", type=Path, default=Path("digits-out"), help="for results (default: digits-out)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    train(parse())
