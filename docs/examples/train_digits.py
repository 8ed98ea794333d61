"""Train a neural network on handwritten digits, in plain NumPy, on any number of ranks.

    mpistrat run -n 4 docs/examples/train_digits.py

Every rank runs this whole file. A NumPy array is the value of the rank that holds it; where the values of
all ranks become one, there is a call that all of them make: reduce, all_reduce, apply_gradients, save. The
result is the same for any number of ranks, up to rounding.
"""

import argparse
import itertools
import json
import os
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np

import mpistrat

LAYERS = (64, 128, 64, 10)
FILES = {"train-0.h5": 200, "train-1.h5": 537, "train-2.h5": 300, "train-3.h5": 400, "test.h5": 360}


# --- the data: 1,797 images of 8 x 8 pixels from 0 to 16, which come with scikit-learn -----------------------


def is_complete(path, rows):
    try:
        with h5py.File(path) as file:
            return file["images"].shape == (rows, 8, 8) and file["labels"].shape == (rows,)
    except (OSError, KeyError):
        return False


def write_digits(folder):
    """Write the files; each appears whole or not at all."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        for name, rows in FILES.items():
            mine, order = order[:rows], order[rows:]
            with h5py.File(Path(temporary, name), "w") as file:
                file["images"] = digits.images[mine].astype(np.uint8)
                file["labels"] = digits.target[mine].astype(np.int64)
            os.replace(Path(temporary, name), folder / name)


# --- the network: what follows knows nothing of ranks --------------------------------------------------------


def initial_weights(seed, dtype):
    """Name and value of each weight matrix and bias."""
    random = np.random.default_rng(seed)
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(LAYERS)):
        matrix = random.standard_normal((inputs, outputs)) * np.sqrt(2 / inputs)
        yield f"layer{layer}/matrix", matrix.astype(dtype)
        yield f"layer{layer}/bias", np.zeros(outputs, dtype)


def forward(weights, images):
    """The input of each layer, and the ten outputs of the last one."""
    inputs = [images]
    for matrix, bias in zip(weights[0:-2:2], weights[1:-2:2], strict=True):
        inputs.append(np.maximum(inputs[-1] @ matrix + bias, 0))
    return inputs, inputs[-1] @ weights[-2] + weights[-1]


def loss_and_gradients(weights, images, labels, library=np):
    """The cross entropy summed over the rows, of which there may be none, and its gradient by each weight."""
    inputs, outputs = forward(weights, images)
    rows = library.arange(len(labels))
    log_odds = outputs - outputs.max(axis=1, keepdims=True)
    log_odds -= np.log(np.exp(log_odds).sum(axis=1, keepdims=True))
    delta = np.exp(log_odds)
    delta[rows, labels] -= 1
    gradients = []
    for matrix, x in zip(weights[-2::-2], reversed(inputs), strict=True):
        gradients = [x.T @ delta, delta.sum(axis=0), *gradients]
        delta = (delta @ matrix.T) * (x > 0)
    return -log_odds[rows, labels].sum(dtype=np.float64), gradients


# --- the program ---------------------------------------------------------------------------------------------


def array_library(strategy):
    """NumPy, or where the variables live on a GPU CuPy: the network is the same."""
    if strategy.extended.worker_devices[0].startswith("cpu"):
        return np
    import cupy

    return cupy


def train(options):
    """Train on all ranks; returns the variables."""
    start = time.monotonic()
    strategy = mpistrat.MultiWorkerMirroredStrategy(device=options.device, virtual_replicas=options.virtual_replicas)
    library = array_library(strategy)
    data_dir = options.data_dir or options.out / "data"

    # Replica 0 makes the files if they are missing, while the others wait.
    with strategy.chief_first() as first:
        if first and not all(is_complete(data_dir / name, rows) for name, rows in FILES.items()):
            write_digits(data_dir)
        if first:
            options.out.mkdir(parents=True, exist_ok=True)

    def scaled(images, labels):  # mapped after batch(): called once for this replica's part of a batch
        return images.reshape(len(images), 64).astype(options.dtype) / 16, labels

    # batch() says the size of the *global* batch, which the replicas share: each reads only its own rows.
    # DATA keeps these batches the same for any number of replicas, which whole files for each would not.
    divided = mpistrat.data.Options()
    divided.experimental_distribute.auto_shard_policy = mpistrat.data.AutoShardPolicy.DATA
    names = ("images", "labels")
    training = mpistrat.data.Dataset.from_hdf5(data_dir / "train-*.h5", names).with_options(divided)
    training = training.shuffle(seed=options.seed).batch(options.batch_size).map(scaled)
    training = strategy.experimental_distribute_dataset(training)
    test = mpistrat.data.Dataset.from_hdf5(data_dir / "test.h5", names).with_options(divided)
    test = strategy.experimental_distribute_dataset(test.batch(options.batch_size).map(scaled))

    # A variable made in the scope has a copy on every replica, and the copies are equal at all times.
    with strategy.scope():
        initial = initial_weights(options.seed, options.dtype)
        variables = [mpistrat.Variable(value, name=name) for name, value in initial]
        optimizer = mpistrat.optimizers.Adam(options.lr)

    def train_step(batch):
        images, labels = map(library.asarray, batch)
        weights = [library.asarray(v) for v in variables]
        loss, gradients = loss_and_gradients(weights, images, labels, library)
        # The step is that of the mean over the *examples* of the global batch. The last batch is smaller,
        # and the replicas' parts differ by a row, so: divide by the number of all, and let
        # apply_gradients add up the replicas' gradients. A NumPy integer would make float64 of float32: int().
        replica = mpistrat.get_replica_context()
        examples = int(replica.all_reduce("SUM", len(labels)))
        optimizer.apply_gradients(zip([g / examples for g in gradients], variables, strict=True))
        return float(loss), len(labels)

    def test_step(batch):
        images, labels = map(library.asarray, batch)
        _, outputs = forward([library.asarray(v) for v in variables], images)
        return int((outputs.argmax(axis=1) == labels).sum()), len(labels)

    # What run() returns is this replica's. Sums over the replicas and the steps are those of all examples,
    # however unevenly they lie on the replicas; a mean of the replicas' means would not be.
    def sums(step, dataset):
        results = (strategy.run(step, (batch,)) for batch in dataset)
        return np.sum([strategy.reduce("SUM", each, axis=None) for each in results], axis=0)

    history = mpistrat.training.History(csv=options.out / "history.csv")
    with strategy.scope():
        for epoch in mpistrat.training.progress(range(options.epochs), "epochs"):
            loss, examples = sums(train_step, training)
            history.log(epoch=epoch, loss=loss / examples)
    correct, images = sums(test_step, test)

    mpistrat.training.save(variables, options.out / "weights.h5")
    if strategy.is_chief:
        replicas = strategy.num_replicas_in_sync
        losses = [row["loss"] for row in history.rows]
        result = {"loss": losses, "accuracy": float(correct / images), "replicas": replicas}
        (options.out / "history.json").write_text(json.dumps(result, indent=1) + "\n")
        plot(losses, options.out / "history.png")
        seconds = time.monotonic() - start
        print(f"test accuracy {correct / images:.3f}  {images} images  {replicas} replicas  {seconds:.1f} s")
    return variables


def plot(losses, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    axes.semilogy(range(1, len(losses) + 1), losses)
    axes.set(xlabel="epoch", ylabel="mean training loss")
    figure.savefig(path, dpi=80)


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=20, help="(default: 20)")
    parser.add_argument("--batch-size", type=int, default=128, help="of the global batch (default: 128)")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate of Adam (default: 0.003)")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--device", default="cpu", help="cpu, cuda (a GPU for each rank) or auto (default: cpu)")
    parser.add_argument(
        "--virtual-replicas",
        type=int,
        help="replicas, for the same bits on any number of ranks (default: one for each rank)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the images")
    parser.add_argument("--data-dir", type=Path, help="where the HDF5 files are (default: OUT/data)")
    parser.add_argument("--out", type=Path, default="digits-out", help="for results (default: digits-out)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    train(parse())
