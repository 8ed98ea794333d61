"""Compare what groups learn that exchange seldom, or send less, with an all-reduce in each step: handwritten digits."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpistrat.bench import under_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from reporting import LIBRARY, Report

TRAINING = 1437  # of 1,797 images; the others are tested
BATCH = 128  # images of all ranks
BASELINE = "all-reduce in each step"


def measure(arguments: argparse.Namespace) -> int:
    """Measure in this process, one of the ranks, and return the exit status."""
    from mpi4py import MPI

    from mpistrat.experimental import Mesh, PowerSGD
    from mpistrat.optimizers import SGD

    comm = MPI.COMM_WORLD
    axis = Mesh(group=-1, replica=1).axis("replica")  # each rank is a group
    nesterov = SGD(0.7, momentum=arguments.momentum, nesterov=True)
    every = {"groups": axis, "sync_every": arguments.every}
    report = Report("groups_digits", comm.size)
    seconds, *lines = _trained(BASELINE, {}, arguments)
    for case, options in {
        f"weights every {arguments.every} steps": every,
        f"weights every {arguments.every} steps, Nesterov": {**every, "outer_optimizer": nesterov},
        "PowerSGD, rank 4": {"groups": axis, "compression": PowerSGD(4)},
    }.items():
        own, line = _trained(case, options, arguments)
        report.add(case, LIBRARY, 0, own)
        report.add(case, BASELINE, 0, seconds)
        lines.append(line)
    if comm.rank == 0:
        report.show(arguments.json, *lines)
    return 0


def _trained(case: str, options: Mapping[str, Any], arguments: argparse.Namespace) -> tuple[float, str]:
    """Train from several seeds. Return the seconds of one training, and a line about the accuracy."""
    began = time.perf_counter()
    found = [100 * _accuracy(seed, arguments.epochs, options) for seed in range(arguments.repetitions)]
    of_seeds = " ".join(f"{each:.2f}" for each in found)
    return (
        (time.perf_counter() - began) / len(found),
        f"{case}: {sum(found) / len(found):.2f} % of the test images ({of_seeds})",
    )


def _accuracy(seed: int, epochs: int, options: Mapping[str, Any]) -> float:
    """Train, and return the share of the test images that are recognized."""
    import numpy as np
    from mpi4py import MPI
    from sklearn.datasets import load_digits

    import mpistrat

    sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples"))
    import train_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images, labels = (digits.images.reshape(-1, 64) / 16).astype(np.float32)[order], digits.target[order]
    strategy = mpistrat.MultiWorkerMirroredStrategy(**options)
    with strategy.scope():
        variables = [mpistrat.Variable(each) for _, each in train_digits.initial_weights(seed, np.float32)]
        optimizer = mpistrat.optimizers.Adam(0.003)

    def step(batch: Any) -> None:
        _, gradients = train_digits.loss_and_gradients([np.asarray(v) for v in variables], *batch)
        rows = int(mpistrat.get_replica_context().all_reduce("SUM", len(batch[0])))
        optimizer.apply_gradients(zip([each / rows for each in gradients], variables, strict=True))

    dataset = mpistrat.data.Dataset.from_arrays((images[:TRAINING], labels[:TRAINING])).shuffle(seed=seed)
    rows = BATCH * strategy.num_replicas_in_sync // MPI.COMM_WORLD.size
    batches = strategy.experimental_distribute_dataset(dataset.batch(rows, drop_remainder=True))
    for _ in range(epochs):
        for batch in batches:
            strategy.run(step, args=(batch,))
    optimizer.finalize_variable_values(variables)
    _, outputs = train_digits.forward([np.asarray(v) for v in variables], images[TRAINING:])
    return float((outputs.argmax(axis=1) == labels[TRAINING:]).mean())


if __name__ == "__main__":
    parser = under_ranks.parser(__doc__, repetitions=3)
    under_ranks.count(parser, "--epochs", 20, "passes over the training images")
    under_ranks.count(parser, "--every", 8, "steps between two exchanges of weights")
    parser.add_argument("--momentum", type=float, default=0.5, help="of the outer optimizer (%(default)s)")
    sys.exit(under_ranks.run(parser, sys.argv[1:], [__file__], measure))
