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
_KERNEL = 3  # of the convolution: neighbouring features
_WEIGHTS = np.random.default_rng(6).random((_FEATURES + _CLASSES, _HIDDEN), np.float32) / 8

# Of the weights and the losses, and the metric, by the number of replicas.
DIGESTS = {
    (6, "tree"): ("efb752a9b7c3fa31", "f20f7e194b4595b6", "0.4785163666787816"),
    (6, "exact"): ("deaf1717729bf344", "274fbb133a8320b3", "0.4785163671444429"),
    (6, "accumulated"): ("88b1b40d1d4e2aa3", "4c0872a2af4386ff", "0.7251697154747995"),
    (6, "convolution"): ("52c7779965a347d5", "ae2db0eee13d9069", "0.37868570789901745"),
    (8, "tree"): ("799eebb872111467", "f5a1397b36a8541c", "0.47851636657530133"),
    (8, "exact"): ("eb612347922b1f69", "f20f7e194b4595b6", "0.47851636693748234"),
    (8, "accumulated"): ("eea93696158fb925", "d92c17f4f778462a", "0.7251697161150837"),
    (8, "convolution"): ("043f0eeac324774a", "8909965ef1733a0f", "0.37868570858457434"),
}


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The matrix product, added in the order of the inner axis."""
    return (a.T[:, :, None] * b[:, None, :]).sum(0)


def digest(*values: Any) -> str:
    whole = hashlib.sha256()
    for value in values:
        whole.update(np.ascontiguousarray(value).tobytes())
    return whole.hexdigest()[:16]


class Training:
    """The training of a network under a strategy: its state, and what it has shown so far.

    Its first layer is dense, or a convolution.
    """

    def __init__(self, strategy: Any, accumulate: int | None = None, buffers: bool = False, convolution: bool = False):
        self.strategy, self.losses, self.convolution = strategy, [], convolution
        first, second = _WEIGHTS[:_FEATURES], _WEIGHTS[_FEATURES:].T
        if convolution:
            first, second = first[:_KERNEL], np.tile(second, (_FEATURES - _KERNEL + 1, 1))
        with strategy.scope():
            self.first = mpistrat.Variable(first, name="first")
            self.second = mpistrat.Variable(second, name="second")
            self.bias = mpistrat.Variable(np.zeros(_CLASSES, np.float32), name="bias")
            self.optimizer = optimizers.SGD(0.05, momentum=0.5, gradient_accumulation_steps=accumulate)
            self.metric = metrics.Mean("loss")
        self.variables = [self.first, self.second, self.bias]
        self.buffers = strategy.experimental_buffers_like(self.variables) if buffers else None

    def step(self, batch: np.ndarray) -> np.floating:
        x, wanted = batch[:, :_FEATURES], batch[:, _FEATURES:]
        rows = len(x)
        if self.convolution:
            x = np.lib.stride_tricks.sliding_window_view(x, _KERNEL, 1).reshape(-1, _KERNEL)
        hidden = np.maximum(_product(x, np.asarray(self.first)), 0).reshape(rows, -1)
        error = _product(hidden, np.asarray(self.second)) + self.bias - wanted
        losses = (error * error).sum(1)
        self.metric.update_state(losses)
        slope = error * np.float32(2 / ROWS)
        back = _product(slope, np.asarray(self.second).T) * (hidden > 0)
        gradients = [_product(x.T, back.reshape(-1, _HIDDEN)), _product(hidden.T, slope), slope.sum(0)]
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


def trained(
    replicas: int,
    comm: Any = None,
    accumulate: int | None = None,
    buffers: bool = False,
    convolution: bool = False,
    **options: Any,
) -> tuple[str, str, str]:
    """What a training of 6 steps shows."""
    strategy = mpistrat.MultiWorkerMirroredStrategy(
        communication_options=mpistrat.experimental.CommunicationOptions(**options),
        comm=comm,
        virtual_replicas=replicas,
    )
    training = Training(strategy, accumulate, buffers, convolution)
    training.run(range(6))
    return training.shown()


def check_all(replicas: int, comm: Any = None) -> None:
    """Compare what trainings show with what they show on any number of ranks."""
    assert trained(replicas, comm) == DIGESTS[replicas, "tree"]
    assert trained(replicas, comm, implementation="exact") == DIGESTS[replicas, "exact"]
    assert trained(replicas, comm, accumulate=3) == DIGESTS[replicas, "accumulated"]
    assert trained(replicas, comm, convolution=True) == DIGESTS[replicas, "convolution"]
