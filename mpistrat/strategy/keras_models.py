"""Models of Keras in a scope: their own training loop would train another model on each rank.

Keras' `fit` computes gradients from the rows that it is given, and knows of no other rank. What trains over ranks
registers itself with `train_by`; without it, `fit` in a scope of several replicas raises.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.util
import sys
import weakref
from collections.abc import Callable
from typing import Any

from mpistrat import context

_TRAINING = ("fit", "train_on_batch")
_LOOKING = ("evaluate", "predict", "test_on_batch")  # without `train_by`, each rank does these alone
SAVING = ("save", "save_weights", "export")
"""The methods of a model that write files."""
_MADE_HERE = "_mpistrat_strategy"  # an attribute of models: the strategy of the scope
_REMEDY = (
    "Keras' training would fit another model on each of {size} ranks, each to its own rows, and say nothing. Add the "
    "line `import mpistrat.integrations.keras`, with which Keras trains over all ranks; or write the loop with this "
    "strategy: compute gradients in `strategy.run`, combine them by "
    "`mpistrat.get_replica_context().all_reduce('MEAN', gradients)`, then `model.optimizer.apply(gradients)`; or train "
    "on one rank, outside of `strategy.scope()`"
)

Trainer = Callable[[Any, Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
_trainer: Trainer | None = None


def train_by(trainer: Trainer) -> None:
    """Let ``trainer(strategy, model, method, args, kwargs)`` train models of a scope, instead of an error."""
    global _trainer
    _trainer = trainer
    watch()


def watch() -> None:
    """Let models of Keras that are made, compiled or trained in a scope be trained by `train_by`, or raise at `fit`.

    If Keras is not imported, they are watched once it is: TensorFlow imports it at the first use of ``tf.keras``.
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
        # Asks the other finders: this one has removed itself.
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
    # Watched already, or another module of this name.
    if model is None or hasattr(model, _MADE_HERE):
        return
    setattr(model, _MADE_HERE, None)
    for names, wrapper in ((("__init__", "compile"), _noting), ((*_TRAINING, *_LOOKING, *SAVING), _handing_over)):
        for name in names:
            # Where it is defined: Keras asks whether a model has the `compile` of its trainer.
            owner = next(kind for kind in model.__mro__ if name in vars(kind))
            setattr(owner, name, wrapper(getattr(owner, name)))


def _current() -> Any:
    return None if context.is_default() else context.current().strategy


def strategy_of(model: Any) -> Any:
    """Return the strategy that trains a model: of this scope, else of the scope that it was made in, or None."""
    return _current() or getattr(model, _MADE_HERE, None)


made: weakref.WeakSet[Any] = weakref.WeakSet()
"""The models that were made or compiled since Keras is watched."""


def _noting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def note(self: Any, *args: Any, **kwargs: Any) -> Any:  # Keras reads the first name of __init__
        result = method(self, *args, **kwargs)
        made.add(self)
        if (strategy := _current()) is not None:
            # Keras' own __setattr__ would track the strategy as a part of the model.
            object.__setattr__(self, _MADE_HERE, strategy)
        return result

    return note


def _handing_over(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def train(model: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = strategy_of(model)
        if strategy is None:
            return method(model, *args, **kwargs)
        if _trainer is not None:
            return _trainer(strategy, model, method, args, kwargs)
        if (size := strategy.num_replicas_in_sync) > 1 and method.__name__ in _TRAINING:
            raise RuntimeError(f"{type(model).__name__}.{method.__name__}: {_REMEDY.format(size=size)}")
        return method(model, *args, **kwargs)

    return train
