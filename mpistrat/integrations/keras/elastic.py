"""A callback with which `fit` goes on within an epoch, in the next run of a program that has lost a rank."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import warnings
from typing import Any

import keras
import numpy as np

from mpistrat.integrations.keras import hooks, step
from mpistrat.integrations.keras.parts import is_dataset
from mpistrat.runtime.environment import rc
from mpistrat.strategy import keras_models
from mpistrat.training.elastic_loop import ElasticState


class ElasticCallback(keras.callbacks.Callback):
    """Keep the state of `fit` in copies and files, and go on from the newest one, within an epoch.

    When a batch has ended, the state is copied to the memory of each node, as often as copies take ``copy_share`` of
    the time, where ``mpistrat run --elastic`` runs the program. The next run goes on with the batch after the newest
    whole copy: its weights are those of a run without a loss, bit for bit, and each row is seen once. A checkpoint is
    saved every ``every_seconds``, at a notice that the job will end, and at the end of training.

    Parameters
    ----------
    directory : path
        For the checkpoints of one call of `fit`. All runs of the program and all nodes see it. It is created if it does
        not exist.
    every_seconds : float
        The time between two checkpoints.
    copy_share : float
        The part of the time that copies may take, above 0. With 1 each batch is followed by a copy.

    Raises
    ------
    ValueError
        At the beginning of training: with ``steps_per_epoch``; with an input other than arrays, a ``PyDataset`` and a
        dataset of `mpistrat.data`, as only these can be read again from a batch on; if the next run may have fewer
        ranks (``mpistrat run --elastic fewer``), as Keras' weights depend on their number; if ``copy_share`` is out of
        range, or the model has no strategy.
    OSError, mpistrat.data.DataFileError
        On every rank, if the directory cannot be written, or its newest checkpoint is damaged.

    Notes
    -----
    Weights, optimizer, metrics, random generators and the place are kept; what other callbacks have noted, and the
    history of earlier epochs, are not. An epoch of unknown length is begun again. Let it be the last callback: what
    others change at the end of training is then saved, too.

    Examples
    --------
    >>> callback = mpistrat.integrations.keras.ElasticCallback("ckpt")  # doctest: +SKIP
    >>> model.fit(x, y, batch_size=256, epochs=10, callbacks=[callback])  # doctest: +SKIP
    """

    def __init__(self, directory: str | os.PathLike[str], every_seconds: float = 600.0, copy_share: float = 0.005):
        super().__init__()
        self._settings = directory, every_seconds, copy_share

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore the newest copy or checkpoint."""
        model = self.model
        if rc.elastic_ranks == "fewer":
            raise ValueError(
                "ElasticCallback: after a loss the program may run on fewer ranks, and Keras' weights depend on their "
                "number: use --elastic same"
            )
        strategy = keras_models.strategy_of(model)
        if strategy is None:
            raise ValueError("ElasticCallback: make the model in the scope of a strategy")
        self._of_rank = _StateOfRank(model)
        self._position = np.zeros(2, np.int64)  # an epoch, and how many of its batches have ended
        objects = {"weights": self._of_rank.others(), "of_rank": self._of_rank, "place": self._position}
        self._state = ElasticState(objects, *self._settings, strategy)
        self._has_unkept = False
        self._is_resumed = self._state.step > 0
        self._epoch, self._first = self._position.tolist()
        self._of_epoch = contextlib.ExitStack()
        if self._is_resumed:
            hooks.begin_at(model, self._epoch, self._first)
            hooks.finish_restoring(model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Keep the state after the last epoch, whose end has averaged statistics over ranks."""
        if self._is_resumed:
            self._of_rank.begin_epoch_again()
            # Keras expects all batches of the epoch, and would warn at the end of the rest.
            self._of_epoch.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Your input ran out of data")
        else:
            self._first = 0
            self._of_rank.begin_epoch()
        self._is_resumed, self._epoch = False, epoch
        self._keep(epoch, 0)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Keep the state after the last batch.

        Keras on JAX and TensorFlow comes here before it knows that an input of unknown length has ended. To go on there
        would be an epoch without a batch, so such an epoch is begun again.
        """
        if (steps := self.params.get("steps")) is not None and self._first + batch < steps:
            self._keep(self._epoch, self._first + batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note that there is something to keep."""
        self._has_unkept = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Let Keras warn again."""
        self._of_epoch.close()

    def on_train_end(self, logs: Any = None) -> None:
        """Save the state."""
        self._keep(self.params["epochs"], 0)  # also after `EarlyStopping`
        self._state.finish()

    def _keep(self, epoch: int, batches: int) -> None:
        if self._has_unkept:
            self._has_unkept = False
            step.wait_for_host()
            _ = self.model  # on JAX the property writes the trained values to the variables
            self._position[:] = epoch, batches
            self._state.advance()


class _StateOfRank:
    """The state that differs between ranks within an epoch: metrics, statistics, and random generators."""

    def __init__(self, model: Any):
        self._metrics = model.metrics_variables
        own = [*self._metrics, *hooks.moving_statistics(model), *hooks.seed_states(model)]
        self._own = {id(variable): variable for variable in own}
        of_optimizers = [variable for optimizer in hooks.optimizers_of(model) for variable in optimizer.variables]
        self._all = {id(variable): variable for variable in (*model.variables, *of_optimizers)}
        self._restored: list[Any] = []
        self.begin_epoch()

    def others(self) -> list[Any]:
        """Return the variables that all ranks have alike."""
        return [variable for key, variable in self._all.items() if key not in self._own]

    def get_state(self) -> dict[str, Any]:
        """Return the values of the variables, and the states of random generators.

        Sources draw the order of an epoch from the generators of Python and NumPy, so their states at its begin are
        kept. Keras draws dropout from torch's.
        """
        values = [np.asarray(keras.ops.convert_to_numpy(variable.value)) for variable in self._own.values()]
        of_torch = [generator.get_state().numpy() for generator in _generators()]
        return {"variables": values, "torch": of_torch, "of_epoch": self._of_epoch}

    def set_state(self, state: dict[str, Any]) -> None:
        """Set them to what `get_state` has returned."""
        self._restored, self._of_epoch = state["variables"], state["of_epoch"]
        for variable, value in zip(self._own.values(), self._restored, strict=True):
            variable.assign(value)
        for generator, saved in zip(_generators(), state["torch"], strict=True):
            generator.set_state(sys.modules["torch"].from_numpy(saved))

    def begin_epoch(self) -> None:
        """Note the states of the generators by which an epoch is drawn."""
        self._of_epoch = random.getstate(), np.random.get_state()  # noqa: NPY002 (global, as is the use of it)

    def begin_epoch_again(self) -> None:
        """Restore the generators of the epoch's begin, and the metrics, which Keras has just reset."""
        of_python, of_numpy = self._of_epoch
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
        for variable, value in zip(self._metrics, self._restored, strict=False):
            variable.assign(value)


def _generators() -> list[Any]:
    """Return the random generators of torch, on the host and on its GPUs, where it is the backend of Keras."""
    if hooks.BACKEND != "torch":
        return []
    torch = sys.modules["torch"]
    return [torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())]


def uses_elastic(values: dict[str, Any]) -> bool:
    """Return whether `fit` was given an `ElasticCallback`. Raise ValueError if it cannot go on within an epoch."""
    callbacks = values.get("callbacks") or []
    callbacks = callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks
    if not any(isinstance(callback, ElasticCallback) for callback in keras.tree.flatten(callbacks)):
        return False
    if values.get("steps_per_epoch") is not None:
        raise ValueError(
            "ElasticCallback goes on within an epoch of the input: give fit no steps_per_epoch, and an input that ends"
        )
    x = values.get("x")
    are_arrays = all(hasattr(array, "__array__") and hasattr(array, "shape") for array in keras.tree.flatten(x))
    if not (are_arrays or is_dataset(x) or isinstance(x, keras.utils.PyDataset)):
        raise ValueError(
            f"ElasticCallback cannot go on within an epoch of a {type(x).__name__}, whose order it cannot draw again: "
            "give fit arrays, a PyDataset or a dataset of mpistrat.data"
        )
    return True
