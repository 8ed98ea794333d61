"""Keras' `Model.fit` over the ranks of a strategy, on PyTorch, JAX and TensorFlow. Importing this package is enough.

A model that is made, compiled or trained in the scope of a strategy is then trained by all its ranks. ``batch_size``
counts the rows of all ranks, and each rank computes its part; weights, metrics and logs are as in one process.

Examples
--------
>>> import mpistrat.integrations.keras  # doctest: +SKIP
>>> with strategy.scope():  # doctest: +SKIP
...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
...     model.compile("adam", "mse")
>>> model.fit(x, y, batch_size=256)  # doctest: +SKIP
"""

from __future__ import annotations

import os

from mpistrat.integrations.keras import hooks, step
from mpistrat.integrations.keras.batch_normalization import SyncBatchNormalization
from mpistrat.integrations.keras.elastic import ElasticCallback
from mpistrat.integrations.keras.training import train
from mpistrat.process.own_files import skip_in_call_sites
from mpistrat.strategy import keras_models

__all__ = ["ElasticCallback", "SyncBatchNormalization"]

hooks.wrap_loss_reduction(step.reduced_over_ranks)
for _kind in (hooks.keras.metrics.Mean, hooks.keras.metrics.Sum):
    _kind.update_state = step.averaged_over_ranks(_kind.update_state)
hooks.wrap_optimizers(step.applied_over_ranks, step.scaled_over_ranks)
hooks.note_assignments()
hooks.make_backups_atomic()
keras_models.train_by(train)
# These functions would write on each rank.
hooks.keras.saving.save_model = hooks.keras.models.save_model = hooks.keras.Model.save
hooks.keras.saving.save_weights = hooks.keras.Model.save_weights
skip_in_call_sites(os.path.dirname(hooks.keras.__file__))
