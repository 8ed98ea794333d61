"""Small work written with NumPy, h5py and mpi4py, to win.

Parameters, gradients and the optimizer's state are flat buffers that are allocated once; the model reads views of
the first. A step packs the gradients by one `concatenate`, sums them in place by one `Allreduce`, and updates in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from mpi4py import MPI
from step_by_hand import views

LossAndGradients = Callable[..., tuple[float, list[np.ndarray]]]


class FlatParameters:
    """Parameters in one buffer, with views of them.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    initial : sequence of numpy.ndarray
        The initial values, of one dtype.
    """

    def __init__(self, comm: Any, initial: Sequence[np.ndarray]):
        self.comm = comm
        self.flat = np.concatenate(initial, axis=None)
        self.gradient = np.zeros_like(self.flat)
        self.views = views(self.flat, [value.shape for value in initial])

    def sum_of(self, gradients: Sequence[np.ndarray]) -> np.ndarray:
        """Return the gradients summed over the ranks, as a flat array."""
        np.concatenate(gradients, axis=None, out=self.gradient)
        self.comm.Allreduce(MPI.IN_PLACE, self.gradient)
        return self.gradient


class Sgd(FlatParameters):
    """Gradient descent."""

    def apply(self, gradients: Sequence[np.ndarray], rate: float = 0.003) -> None:
        """Do one step."""
        change = self.sum_of(gradients)
        change *= rate
        self.flat -= change


class Adam(FlatParameters):
    """Adam."""

    def __init__(self, comm: Any, initial: Sequence[np.ndarray]):
        super().__init__(comm, initial)
        self.m, self.v, self.scratch = (np.zeros_like(self.flat) for _ in range(3))
        self.step = 0

    def apply(self, gradients: Sequence[np.ndarray], rate: float = 0.003) -> None:
        """Do one step."""
        g, m, v, part = self.sum_of(gradients), self.m, self.v, self.scratch
        self.step += 1
        np.subtract(g, m, part)
        part *= 0.1
        m += part
        g *= g
        g -= v
        g *= 0.001
        v += g
        np.sqrt(v, part)
        part += 1e-7
        np.divide(m, part, part)
        part *= rate * (1 - 0.999**self.step) ** 0.5 / (1 - 0.9**self.step)
        self.flat -= part


def train(
    comm: Any,
    differentiate: LossAndGradients,
    initial: Sequence[np.ndarray],
    images: np.ndarray,
    labels: np.ndarray,
    batch: int,
    epochs: int,
) -> list[float]:
    """Train on shuffled batches of rows in memory. Return the mean loss of each epoch."""
    parameters = Adam(comm, initial)
    images = images.astype(np.float32) / 16
    mine = slice(comm.rank * batch // comm.size, (comm.rank + 1) * batch // comm.size)
    random = np.random.default_rng(0)
    losses = []
    total = np.empty(1)
    for _ in range(epochs):
        order = random.permutation(len(labels))
        total[0] = 0
        for start in range(0, len(labels), batch):
            rows = order[start : start + batch]
            examples = len(rows)
            rows = rows[mine]
            loss, gradients = differentiate(parameters.views, images.take(rows, 0), labels.take(rows))
            parameters.apply([gradient / examples for gradient in gradients])
            total[0] += loss
        comm.Allreduce(MPI.IN_PLACE, total)
        losses.append(total[0] / len(labels))
    return losses


def train_on_files(
    comm: Any, differentiate: LossAndGradients, initial: Sequence[np.ndarray], folder: Path, batch: int, epochs: int
) -> list[float]:
    """Read HDF5 files whole, and train as `train` does."""
    parts: dict[str, list[np.ndarray]] = {"images": [], "labels": []}
    for path in sorted(folder.glob("train-*.h5")):
        with h5py.File(path) as file:
            for name, found in parts.items():
                found.append(file[name][:])
    images, labels = (np.concatenate(found) for found in parts.values())
    return train(comm, differentiate, initial, images, labels, batch, epochs)


def reduce_one(comm: Any, array: np.ndarray) -> Callable[[int], np.ndarray]:
    """Return a function that sums an array into a new one k times."""

    def times(k: int) -> np.ndarray:
        for _ in range(k):
            total = np.empty_like(array)
            comm.Allreduce(array, total)
        return total

    return times


def reduce_number(comm: Any, number: int) -> Callable[[int], int]:
    """Return a function that sums a number k times."""
    message = np.empty(1, np.int64)

    def times(k: int) -> int:
        for _ in range(k):
            message[0] = number
            comm.Allreduce(MPI.IN_PLACE, message)
            total = int(message[0])
        return total

    return times


class Mean:
    """The mean of values of all ranks."""

    def __init__(self, comm: Any):
        self.comm = comm
        self.counted = np.zeros(2)

    def update_state(self, values: np.ndarray) -> None:
        """Count values of this rank."""
        self.counted[0] += values.sum(dtype=np.float64)
        self.counted[1] += values.size

    def result(self) -> float:
        """Return the mean over all ranks."""
        total = np.empty(2)
        self.comm.Allreduce(self.counted, total)
        return total[0] / total[1]
