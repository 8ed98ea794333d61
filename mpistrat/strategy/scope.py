"""The context in which a strategy is current."""

from __future__ import annotations

from typing import Generic, TypeVar

from mpistrat import context
from mpistrat.strategy.checks import mixing

Owner = TypeVar("Owner", bound=context.AnyStrategy)


class Scope(Generic[Owner]):
    """A context that makes its strategy current; `Strategy.scope` returns it."""

    __slots__ = ("_strategy",)

    def __init__(self, strategy: Owner):
        self._strategy = strategy

    def __enter__(self) -> Owner:
        strategy = self._strategy
        mode = context.current()
        if not context.is_default():
            if mode.strategy is not strategy:
                mixing(mode.strategy, strategy)
            if mode.replica_context is not None:
                raise RuntimeError(
                    "Method requires being in cross-replica context, use get_replica_context().merge_call(): "
                    "scope() was entered in a replica context"
                )
        context.stack().append(strategy.extended.cross_replica_mode)
        return strategy

    def __exit__(self, *exc_info: object) -> None:
        context.stack().pop()
