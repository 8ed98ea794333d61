"""A fast data-parallel training step in NumPy and mpi4py.

The parameters are views of one buffer, the gradients of another, and the model writes to it directly:
the step neither packs nor allocates. It does one all-reduce and one update, both in place and in the
order of memory. The update is done in pieces that fit the CPU cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

_PIECE = 1 << 15  # elements per update


def views(flat: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Return consecutive views of a flat buffer with these shapes."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), shapes, strict=True)]


class StepByHand:
    """A training step written by hand.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    make_model : callable
        Takes the arrays for the gradients, and returns an object with
        ``differentiate(parameters, images, labels, examples)``.
    initial : sequence of numpy.ndarray
        The initial parameters.
    momentum : float
    pieces : int, optional
        Bytes of the buffer per all-reduce, by default all.
    """

    def __init__(
        self,
        comm: Any,
        make_model: Callable[[Sequence[np.ndarray]], Any],
        initial: Sequence[np.ndarray],
        momentum: float = 0.0,
        pieces: int | None = None,
    ):
        shapes = [value.shape for value in initial]
        self._comm = comm
        self._flat = np.concatenate([value.reshape(-1) for value in initial])
        self._gradient = np.zeros_like(self._flat)
        self._velocity = np.zeros_like(self._flat)
        self._momentum = np.float32(momentum)
        self._pieces = len(self._flat) if pieces is None else pieces // self._flat.itemsize
        self._model = make_model(views(self._gradient, shapes))
        self.parameters = views(self._flat, shapes)

    def step(self, images: np.ndarray, labels: np.ndarray, rate: float = 0.1) -> float:
        """Do one step. Return this rank's part of the loss."""
        comm, gradient = self._comm, self._gradient
        loss = self._model.differentiate(self.parameters, images, labels, len(images) * comm.size)
        for start in range(0, len(gradient), self._pieces):
            comm.Allreduce(MPI.IN_PLACE, gradient[start : start + self._pieces], MPI.SUM)
        self._update(np.float32(rate))
        return loss

    def _update(self, rate: np.float32) -> None:
        for start in range(0, len(self._flat), _PIECE):
            piece = slice(start, start + _PIECE)
            change = self._gradient[piece]
            change *= rate
            if self._momentum:
                velocity = self._velocity[piece]
                velocity *= self._momentum
                velocity += change
                change = velocity
            self._flat[piece] -= change
