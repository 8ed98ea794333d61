"""The context in which a strategy is current."""

from __future__ import annotations

from typing import Generic, TypeVar

from mpistrat import context
from mpistrat.strategy import keras_models
from mpistrat.strategy.checks import require_cross_replica

Owner = TypeVar("Owner", bound=context.AnyStrategy)


class Scope(Generic[Owner]):
    """A context that makes its strategy current; `Strategy.scope` returns it."""

    __slots__ = ("_strategy",)

    def __init__(self, strategy: Owner):
        self._strategy = strategy

    def __enter__(self) -> Owner:
        require_cross_replica(self._strategy, "scope", "enter it outside of run")
        keras_models.watch()
        context.stack().append(self._strategy.extended.cross_replica_mode)
        return self._strategy

    def __exit__(self, *exc_info: object) -> None:
        context.stack().pop()
