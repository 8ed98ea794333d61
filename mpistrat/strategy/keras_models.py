"""Models of Keras in a scope: their own training loop would train another model on each rank.

Keras' `fit` computes gradients from the rows that it is given, and knows of no other rank.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from mpistrat import context

_TRAINING = ("fit", "train_on_batch")
_MADE_HERE = "_mpistrat_replicas"  # an attribute of models: the number of replicas of the scope
_REMEDY = (
    "Keras' training would fit another model on each of {size} ranks, each to its own rows, and say nothing. Write the "
    "loop with this strategy: compute gradients in `strategy.run`, combine them by "
    "`mpistrat.get_replica_context().all_reduce('MEAN', gradients)`, then `model.optimizer.apply(gradients)`; or train "
    "on one rank, outside of `strategy.scope()`"
)


def watch() -> None:
    """Let models of Keras that are made, compiled or trained in a scope of several replicas raise at `fit`.

    If the program has not imported Keras, its models are watched when it does: TensorFlow imports Keras at the first
    use of ``tf.keras``, which may be inside the scope.
    """
    keras = sys.modules.get("keras")
    if keras is not None:
        _watch_models(keras)
    elif _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _KerasFinder(importlib.abc.MetaPathFinder):
    """Lets the import of Keras end with `_watch_models`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "keras":
            return None
        with contextlib.suppress(ValueError):  # another thread has removed it
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_watch(module: Any) -> None:
                load(module)
                _watch_models(module)

            spec.loader.exec_module = load_and_watch  # type: ignore[method-assign]
        return spec


_finder = _KerasFinder()


def _watch_models(keras: Any) -> None:
    model = getattr(keras, "Model", None)
    if model is None or hasattr(model, _MADE_HERE):
        return
    setattr(model, _MADE_HERE, 1)
    for name in ("__init__", "compile"):
        setattr(model, name, _noting(getattr(model, name)))
    for name in _TRAINING:
        setattr(model, name, _refusing(getattr(model, name)))


def _replicas() -> int:
    return 1 if context.is_default() else int(context.current().strategy.num_replicas_in_sync)


def _noting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def note(model: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(model, *args, **kwargs)
        if (size := _replicas()) > 1:
            object.__setattr__(model, _MADE_HERE, size)
        return result

    return note


def _refusing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def refuse(model: Any, *args: Any, **kwargs: Any) -> Any:
        if (size := max(_replicas(), getattr(model, _MADE_HERE, 1))) > 1:
            raise RuntimeError(f"{type(model).__name__}.{method.__name__}: {_REMEDY.format(size=size)}")
        return method(model, *args, **kwargs)

    return refuse
