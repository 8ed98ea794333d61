"""Keras' `fit`, `evaluate`, `predict` and the methods for one batch: which strategy trains a model, and on what."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import keras
import numpy as np

import mpistrat
from mpistrat import context
from mpistrat.integrations.keras import hooks
from mpistrat.integrations.keras.distributed_training import DistributedTraining, given, source_of, split
from mpistrat.integrations.keras.parts import PartsOfRank

_KEPT = "_mpistrat_training"  # the attribute of a model that keeps its `DistributedTraining`
_STRATEGIES = (mpistrat.MultiWorkerMirroredStrategy, mpistrat.MirroredStrategy, mpistrat.OneDeviceStrategy)


def train(strategy: Any, model: Any, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of a model over the ranks of a strategy.

    Raises
    ------
    ValueError
        If Keras cannot train under this strategy.
    RuntimeError
        In a replica function.
    """
    name = f"{type(model).__name__}.{method.__name__}"
    kwargs = dict(kwargs)
    gather = kwargs.pop("gather", "all") if method.__name__ == "predict" else "all"
    values = dict(inspect.signature(method).bind(model, *args, **kwargs).arguments)
    del values["self"]
    values.update(values.pop("kwargs", {}))
    if isinstance(values.get("x"), PartsOfRank):  # `fit` evaluates
        return method(model, **values)
    if not context.is_default() and context.current().replica_context is not None:
        raise RuntimeError(
            f"{name} was called in strategy.run, in which each replica is alone: call it in the scope"
        )
    if not isinstance(strategy, _STRATEGIES):
        raise ValueError(
            f"{name}: Keras trains under {', '.join(kind.__name__ for kind in _STRATEGIES)}, not under "
            f"{type(strategy).__name__}: write the training loop with strategy.run"
        )
    engine = strategy.extended.engine
    if engine.replicas.is_virtual or not engine.replicas.by_rank:
        raise ValueError(
            f"{name}: {engine.replicas.size} replicas on {engine.topology.size} ranks; Keras trains with one replica "
            "on each rank: make the strategy without virtual_replicas"
        )
    if engine.topology.size == 1:
        return method(model, **(_in_order_of_seed(model, values) if method.__name__ == "fit" else values))
    kept = vars(model).get(_KEPT)
    compiled = hooks.mark_of_compile(model)
    if kept is None or kept.ranks.engine is not engine or kept.compiled is not compiled:
        kept = DistributedTraining(model, engine, compiled, kept is not None and kept.alike)
        object.__setattr__(model, _KEPT, kept)
    return kept.call(functools.partial(method, model), method.__name__, values, gather)


def _in_order_of_seed(model: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `fit` on one rank, with rows in the order that several ranks would read."""
    values = split(values)
    leaves = keras.tree.flatten((values.get("x"), values.get("y"), values.get("sample_weight")))
    if values.get("shuffle", True) and all(each is None or type(each) is np.ndarray for each in leaves):
        source = source_of(values, values.get("steps_per_epoch"), values.get("shuffle", True))
        parts = PartsOfRank(source, 0, 1, with_info=False, seed=hooks.drawn_seed())
        values = given(values, parts)
        if (
            hooks.BACKEND != "tensorflow" and model.compiled
        ):  # else Keras looks at the first epoch to build the model
            hooks.build(model, parts.first())
    return values
