"""Try 200 settings of a model on all ranks, and draw which rank worked on what and when.

    mpistrat run -n 4 docs/examples/sweep.py

Rank 0 hands out the settings, and the other ranks work on them. The tasks take unequal time, so a fixed division
among ranks would leave some of them idle. Here a rank gets its next setting when it has ended the one before.
Started again, or by slurm/farm.sbatch after a time limit, it goes on with the settings that are left.
"""

import argparse
import itertools
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from mpistrat.coordinator import Executor


def data():
    """The images and labels of scikit-learn's digits, as inputs and targets of a regression."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    return digits.images.reshape(-1, 64)[order] / 16, np.eye(10)[digits.target[order]]


def accuracy(inputs, targets, width, ridge):
    """Fit a ridge regression on random features of 1,297 images. Return its accuracy on the other 500."""
    random = np.random.default_rng(width)
    features = np.maximum(inputs @ random.standard_normal((64, width)) / 4, 0)
    known, unknown = features[:-500], features[-500:]
    weights = np.linalg.solve(known.T @ known + ridge * np.eye(width), known.T @ targets[:-500])
    return float(((unknown @ weights).argmax(axis=1) == targets[-500:].argmax(axis=1)).mean())


def plot(results, path):
    """Draw a Gantt chart: one row for each rank, one bar for each task, coloured by accuracy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    first = min(start for *_, start, _ in results)
    accuracies = np.array([each[1] for each in results])
    colours = plt.cm.viridis((accuracies - accuracies.min()) / max(np.ptp(accuracies), 1e-12))
    figure, axes = plt.subplots(figsize=(9, 3))
    for (_, _, rank, start, end), colour in zip(results, colours, strict=True):
        axes.barh(rank, end - start, left=start - first, color=colour, edgecolor="white", linewidth=0.3)
    axes.set(xlabel="seconds", ylabel="rank", yticks=sorted({each[2] for each in results}))
    figure.tight_layout()
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--widths", type=int, default=20, help="numbers of features to try (default: 20)")
    parser.add_argument("--ridges", type=int, default=10, help="ridge parameters to try (default: 10)")
    parser.add_argument("--out", type=Path, default="sweep-out", help="for results (default: sweep-out)")
    options = parser.parse_args()
    with Executor(retries=1) as executor:
        if executor is None:  # a worker: it has run its tasks inside of the block
            return
        inputs, targets = data()

        # Sent once to each worker, with the arrays that it captures.
        def task(setting):
            start = time.time()
            result = accuracy(inputs, targets, *setting)
            return setting, result, MPI.COMM_WORLD.rank, start, time.time()

        widths = np.unique(np.geomspace(16, 512, options.widths).astype(int)).tolist()
        ridges = np.geomspace(1e-3, 1e2, options.ridges).tolist()
        settings = itertools.product(widths, ridges)
        results = list(executor.map(task, settings, keep=options.out / "results.h5"))
        print(executor.statistics())
    (width, ridge), best, *_ = max(results, key=lambda result: result[1])
    print(f"{len(results)} settings, best: accuracy {best:.3f} with {width} features and ridge {ridge:.2g}")
    plot(results, options.out / "gantt.png")


if __name__ == "__main__":
    main()
