"""Keras' `fit`, `evaluate`, `predict` and the methods for one batch: the strategy and the input of a call."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import keras

import mpistrat
from mpistrat import context
from mpistrat.integrations.keras import hooks, step
from mpistrat.integrations.keras.distributed_training import DistributedTraining, source_of, split, with_input
from mpistrat.integrations.keras.elastic import uses_elastic
from mpistrat.integrations.keras.parts import PartsOfRank, is_dataset
from mpistrat.runtime.agreement.operation import operation
from mpistrat.strategy import keras_models

_KEPT = "_mpistrat_training"  # the attribute of a model that keeps its `DistributedTraining`
_STRATEGIES = (mpistrat.MultiWorkerMirroredStrategy, mpistrat.MirroredStrategy, mpistrat.OneDeviceStrategy)


def train(strategy: Any, model: Any, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of a model over the ranks of a strategy.

    Raise ValueError if Keras cannot train under this strategy, and RuntimeError in a replica function.
    """
    if method.__name__ in keras_models.SAVING:
        return _save(strategy, model, method, args, kwargs)
    name = f"{type(model).__name__}.{method.__name__}"
    kwargs = dict(kwargs)
    gather = kwargs.pop("gather", "all") if method.__name__ == "predict" else "all"
    values = dict(inspect.signature(method).bind(model, *args, **kwargs).arguments)
    del values["self"]
    values.update(values.pop("kwargs", {}))
    if isinstance(values.get("x"), PartsOfRank):  # `fit` evaluates
        return method(model, **values)
    if not context.is_default() and context.current().replica_context is not None:
        raise RuntimeError(f"{name} was called in strategy.run, in which each replica is alone: call it in the scope")
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
    if engine.all_ranks is not engine.topology:
        raise ValueError(f"{name}: Keras trains with a replica on each rank: make the strategy without mesh and groups")
    elastic = method.__name__ == "fit" and uses_elastic(values)
    if engine.topology.size == 1:
        return method(model, **_on_one_rank(model, method.__name__, values, engine, elastic))
    if DistributedTraining.alone:
        raise RuntimeError(
            f"{name} was called by a callback of the chief alone, but it is for all ranks: let the callback have no "
            "chief_only = True"
        )
    training = vars(model).get(_KEPT)
    compiled = hooks.compile_marker(model)
    if training is None or training.ranks.engine is not engine or training.compiled is not compiled:
        training = DistributedTraining(model, engine, compiled)
        object.__setattr__(model, _KEPT, training)
    return training.call(functools.partial(method, model), method.__name__, values, gather)


def _save(strategy: Any, model: Any, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call a method that writes a file, on the chief alone, while the other ranks wait. All raise if it fails."""

    def write() -> None:
        step.wait_for_host()
        method(model, *args, **kwargs)

    on_ranks = isinstance(strategy, _STRATEGIES) and not DistributedTraining.alone
    if on_ranks and (context.is_default() or context.current().replica_context is None):
        strategy.extended.engine.topology.on_first(
            write, operation(f"Keras' Model.{method.__name__}, for every rank to call")
        )
    else:
        write()


def _on_one_rank(model: Any, name: str, values: dict[str, Any], engine: Any, elastic: bool) -> dict[str, Any]:
    """Return the arguments of a call on one rank: datasets of `mpistrat.data` as parts, and the rows of `fit` in the
    order that several ranks would read. Threads of a `PyDataset` let Keras alone train twice on some batches.
    """
    fits = name == "fit"
    values = split(values) if fits else values
    held = values.get("validation_data")
    if is_dataset(held):
        source = source_of({"x": held}, values.get("validation_steps"), engine)
        values = {**values, "validation_data": PartsOfRank(source, 0, 1, with_info=False)}
    leaves = keras.tree.flatten((values.get("x"), values.get("y"), values.get("sample_weight")))
    shuffled = fits and values.get("shuffle", True)
    # Keras takes ragged and sparse tensors, too, on one rank: they have no `__array__`.
    arrays = all(leaf is None or (hasattr(leaf, "__array__") and hasattr(leaf, "shape")) for leaf in leaves)
    x = values.get("x")
    if is_dataset(x) or elastic or (fits and isinstance(x, keras.utils.PyDataset)) or (shuffled and arrays):
        steps = values.get("steps_per_epoch" if fits else "steps")
        source = source_of(values, steps, engine, values.get("shuffle", True))
        seed = hooks.draw_seed() if shuffled else 0
        begin = functools.partial(hooks.begin, model, values) if fits else None
        parts = PartsOfRank(source, 0, 1, with_info=False, seed=seed, begin=begin)
        values = with_input(values, parts)
        # Build here: Keras would begin the first epoch only to see a batch.
        if fits and hooks.BACKEND != "tensorflow" and model.compiled:
            hooks.build(model, parts.first())
    return values
