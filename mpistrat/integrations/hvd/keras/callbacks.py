"""Horovod's callbacks of Keras, and the broadcast of variables."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from mpistrat.integrations.hvd import job, moves, reductions
from mpistrat.integrations.keras import hooks, step
from mpistrat.strategy import keras_models


def _broadcast(variables: Sequence[Any], root_rank: int) -> None:
    """Overwrite variables of Keras with the values of one rank, each once. Collective."""
    step.wait_for_host()
    unique = list({id(variable): variable for variable in variables}.values())
    values = [np.asarray(ops.convert_to_numpy(variable.value)) for variable in unique]
    for variable, value in zip(
        unique,
        moves.broadcast_to_hosts(values, root_rank, None, job.global_process_set, "the broadcast of variables"),
        strict=True,
    ):
        variable.assign(value)


def broadcast_global_variables(root_rank: int) -> None:
    """Overwrite the variables of all models, and of their optimizers, with the values of one rank. Collective.

    Models are taken in the order of their names, which Keras makes unique; numbers in names may differ between ranks.

    Parameters
    ----------
    root_rank : int

    Raises
    ------
    MismatchError
        On every rank, if the ranks have other models.

    Examples
    --------
    >>> hvd.broadcast_global_variables(0)  # doctest: +SKIP
    """
    gc.collect()  # a model that nothing uses would be broadcast on the ranks that have not freed it
    models = sorted(keras_models.made, key=lambda model: [part.zfill(9) for part in re.split(r"(\d+)", model.name)])
    _broadcast([variable for model in models for variable in _variables_of(model)], root_rank)


def _variables_of(model: Any) -> list[Any]:
    """Return the variables of a model and its optimizer, but not the states of random generators."""
    seeds = {id(state) for state in hooks.seed_states(model)}
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(() if optimizer is None else optimizer.variables)]
    return [variable for variable in variables if id(variable) not in seeds]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Give all ranks the variables of one rank, once: before training, or if the model has none yet, after a batch.

    Parameters
    ----------
    root_rank : int
    device : str, optional
        Not used.
    local_variables : Variable or sequence of Variable, optional
        Variables that each rank keeps.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = ()):
        super().__init__()
        self._root_rank, self._done = root_rank, False
        single = isinstance(local_variables, keras.Variable)
        self._local = [local_variables] if single else [*(local_variables or ())]

    def set_model(self, model: Any) -> None:
        """Take the model, whose step TensorFlow must not compile by XLA, which cannot call MPI."""
        super().set_model(model)
        if hooks.BACKEND == "tensorflow":
            model.jit_compile = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast, if there is a built model."""
        if self.model.built and not self._done:
            if not self.model.optimizer.built:  # TensorFlow builds it in the first step
                self.model.optimizer.build(self.model.trainable_variables)
            self.on_train_batch_end(0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast, if that was not done."""
        if not self._done:
            local = {id(v) for v in self._local}
            _broadcast([v for v in _variables_of(self.model) if id(v) not in local], self._root_rank)
            self._done = True


class MetricAverageCallback(keras.callbacks.Callback):
    """Average the logs of an epoch over ranks, for the callbacks after this one and for the history."""

    def __init__(self, device: str = ""):
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average."""
        step.wait_for_host()
        names = sorted(logs or ())
        if names:
            values = np.array([float(logs[name]) for name in names])
            logs.update(zip(names, reductions.allreduce(values, name=", ".join(names)).tolist(), strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Set the learning rate to ``initial_lr * multiplier(epoch)`` in the epochs from ``start_epoch`` to ``end_epoch``.

    Parameters
    ----------
    initial_lr : float
    multiplier : float or callable
        A number ``m`` stands for ``m ** (epoch - start_epoch)``.
    start_epoch, end_epoch : int
        The epoch ``end_epoch`` is not among them; by default all that follow are.
    staircase : bool
        Whether the rate is set at the begin of epochs. Else before each batch, for an epoch with a fraction.
    momentum_correction : bool
        Whether a change of the rate scales the momentums of an ``SGD``.
    steps_per_epoch : int, optional
        By default as Keras knows.

    Raises
    ------
    ValueError
        If ``initial_lr`` is missing, or in `fit` if ``steps_per_epoch`` is needed and not known.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ):
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase, self.momentum_correction = staircase, momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.multiplier: Any = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Ask Keras for the number of steps, if it is needed."""
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(f"{type(self).__name__} needs steps_per_epoch: Keras does not know how many there are")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remember the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate, if it is time."""
        if self._epoch < self.start_epoch or (self.end_epoch is not None and self._epoch >= self.end_epoch):
            return
        if self.staircase and batch == 0:
            self._set_rate(self._epoch)
        elif not self.staircase:
            assert self.steps_per_epoch is not None
            self._set_rate(self._epoch + batch / self.steps_per_epoch)

    def _set_rate(self, epoch: float) -> None:
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        old, new = self._rate(), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new
        # Keras' momentum is a constant of the compiled step. The sum of past steps, in which the rate is a factor,
        # is a variable: scaled once, it gives what a momentum that is scaled for one batch would.
        if self.momentum_correction and old and isinstance(optimizer, keras.optimizers.SGD) and optimizer.built:
            for momentum in optimizer.momentums:
                momentum.assign(momentum * (new / old))

    def _rate(self) -> float:
        if hooks.BACKEND == "jax":  # while JAX trains, the variables hold no values
            self.model.jax_state_sync()
        return float(ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add the learning rate to the logs."""
        if logs is not None:
            logs["lr"] = self._rate()


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate from ``initial_lr / hvd.size()`` to ``initial_lr``, batch by batch.

    Parameters
    ----------
    initial_lr : float
    warmup_epochs : int
        In so many epochs.
    momentum_correction, steps_per_epoch
        As in `LearningRateScheduleCallback`.
    verbose : int
        Whether the first rank says when it has ended.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ):
        def multiplier(epoch: float) -> float:
            epoch += 1 / self.steps_per_epoch  # type: ignore[operator]  # so that an epoch ends at a round number
            return (epoch * (job.size() - 1) / warmup_epochs + 1) / job.size()

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add the learning rate to the logs, and report."""
        super().on_epoch_end(epoch, logs)
        if epoch + 1 == self.end_epoch and self.verbose > 0 and job.rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}.")
