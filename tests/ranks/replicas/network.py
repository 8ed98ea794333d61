"""A small network whose training has the same bits wherever NumPy adds along a first axis in order: no BLAS, no exp."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

import mpistrat
from mpistrat import metrics, optimizers

ROWS = 24  # of a global batch
_FEATURES, _HIDDEN, _CLASSES = 6, 5, 3
_ARRAYS = np.random.default_rng(5).random((4 * ROWS, _FEATURES + _CLASSES), np.float32)
_WEIGHTS = np.random.default_rng(6).random((_FEATURES + _CLASSES, _HIDDEN), np.float32) / 8


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The matrix product, added in the order of the inner axis."""
    return (a.T[:, :, None] * b[:, None, :]).sum(0)


def digest(*values: Any) -> str:
    whole = hashlib.sha256()
    for value in values:
        whole.update(np.ascontiguousarray(value).tobytes())
    return whole.hexdigest()[:16]


class Training:
    """The training of a network under a strategy: its state, and what it has shown so far."""

    def __init__(self, strategy: Any, accumulate: int | None = None, buffers: bool = False):
        self.strategy, self.losses = strategy, []
        with strategy.scope():
            self.first = mpistrat.Variable(_WEIGHTS[:_FEATURES], name="first")
            self.second = mpistrat.Variable(_WEIGHTS[_FEATURES:].T, name="second")
            self.bias = mpistrat.Variable(np.zeros(_CLASSES, np.float32), name="bias")
            self.optimizer = optimizers.SGD(0.05, momentum=0.5, gradient_accumulation_steps=accumulate)
            self.metric = metrics.Mean("loss")
        self.variables = [self.first, self.second, self.bias]
        self.buffers = strategy.experimental_buffers_like(self.variables) if buffers else None

    def step(self, batch: np.ndarray) -> np.floating:
        x, wanted = batch[:, :_FEATURES], batch[:, _FEATURES:]
        hidden = np.maximum(_product(x, np.asarray(self.first)), 0)
        error = _product(hidden, np.asarray(self.second)) + self.bias - wanted
        losses = (error * error).sum(1)
        self.metric.update_state(losses)
        slope = error * np.float32(2 / ROWS)
        back = _product(slope, np.asarray(self.second).T) * (hidden > 0)
        gradients = [_product(x.T, back), _product(hidden.T, slope), slope.sum(0)]
        if self.buffers is not None:
            for buffer, gradient in zip(self.buffers, gradients, strict=True):
                buffer[...] = gradient
            gradients = self.buffers
        self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))
        return losses.sum()

    def run(self, steps: range) -> None:
        replicas = self.strategy.num_replicas_in_sync
        rows = ROWS // replicas
        for i in steps:
            batch = _ARRAYS[i % 4 * ROWS :][:ROWS]

            def part(replica: Any, batch: np.ndarray = batch) -> np.ndarray:
                first = replica.replica_id_in_sync_group * rows
                return batch[first : first + rows]

            mine = self.strategy.experimental_distribute_values_from_function(part)
            self.losses.append(self.strategy.reduce("SUM", self.strategy.run(self.step, (mine,)), axis=None))

    def shown(self) -> tuple[str, str, str]:
        """The digests of the weights and losses, and the metric."""
        return digest(*self.variables), digest(*self.losses), repr(float(self.metric.result()))
