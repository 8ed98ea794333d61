"""Callbacks of `fit` on several ranks: which rank calls them, and what all ranks agree on after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras

from mpistrat.integrations.keras import hooks, step

if TYPE_CHECKING:
    from mpistrat.integrations.keras.ranks import TrainingRanks

_WRITING = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.OrbaxCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.ProgbarLogger,
)


def is_chief_only(callback: Any) -> bool:
    """Return whether only the chief calls a callback: it writes, or its attribute ``chief_only`` is true."""
    return bool(getattr(callback, "chief_only", isinstance(callback, _WRITING)))


class LastCallback(keras.callbacks.Callback):
    """The last callback: it sends the chief's weights, and lets all ranks stop after the same step.

    A callback of one rank may ask for a stop. That rank then goes on until the next all-reduce has told all others.
    ``compare(when)`` is called at the end of the first, second, fourth, eighth ... epoch, and of `fit`.
    """

    def __init__(self, ranks: TrainingRanks, send: Callable[[], None] | None, compare: Callable[[str], None]):
        super().__init__()
        self._ranks, self._send, self._compare = ranks, send, compare
        self._epochs = 0

    def set_model(self, model: Any) -> None:
        """Take the model. On JAX, reading ``self.model`` after each batch would copy its weights to the variables."""
        super().set_model(model)
        self._trained = model

    def on_train_begin(self, logs: Any = None) -> None:
        """Send the weights and the epoch that a callback of the chief may have restored."""
        self._ranks.wants_stop = self._ranks.stop = False
        if self._send is not None:
            self._send()
            epoch = self._ranks.topology.broadcast_object(hooks.initial_epoch(self.model))
            hooks.set_initial_epoch(self.model, epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stop if a rank has asked for it in this step, and remember that this one asks."""
        step.wait_for_host()
        self._ranks.wants_stop |= self._trained.stop_training
        self._trained.stop_training = self._ranks.stop

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop if a rank asks for it."""
        ranks = self._ranks
        self._epochs += 1
        stops = self.model.stop_training or ranks.stop or ranks.wants_stop
        self.model.stop_training = not ranks.topology.all_true(not stops)
        if self._epochs & (self._epochs - 1) == 0:
            self._compare(f"after epoch {epoch + 1}")
