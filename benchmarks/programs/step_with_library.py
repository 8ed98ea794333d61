"""A training step of the perceptron with the library."""

from __future__ import annotations

import numpy as np
from step_perceptron import SHAPES, Perceptron, initial_parameters

import mpistrat


class StepWithLibrary:
    """A training step with the library.

    Parameters
    ----------
    rows : int
        Examples per batch of a replica.
    momentum : float
    buffers : bool
        Whether the model writes its gradients to buffers of the strategy, not to plain arrays.
    """

    def __init__(self, rows: int, momentum: float = 0.0, buffers: bool = False):
        self.strategy = mpistrat.MultiWorkerMirroredStrategy()
        with self.strategy.scope():
            self.variables = [mpistrat.Variable(value) for value in initial_parameters()]
        self.optimizer = mpistrat.optimizers.SGD(learning_rate=0.1, momentum=momentum)
        gradients = [np.empty(shape, np.float32) for shape in SHAPES]
        self.model = Perceptron(rows, self.strategy.experimental_buffers_like(gradients) if buffers else gradients)

    @property
    def parameters(self) -> list[np.ndarray]:
        """The current parameters."""
        return [np.asarray(variable) for variable in self.variables]

    def step(self, images: np.ndarray, labels: np.ndarray) -> float:
        """Do one step. Return this replica's part of the loss."""
        return self.strategy.run(self._replica_step, args=((images, labels),))

    def _replica_step(self, batch: tuple[np.ndarray, np.ndarray]) -> float:
        images, labels = batch
        examples = len(images) * self.strategy.num_replicas_in_sync
        loss = self.model.differentiate(self.parameters, images, labels, examples)
        self.optimizer.apply_gradients(zip(self.model.gradients, self.variables, strict=True))
        return loss
