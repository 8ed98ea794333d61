"""The current strategy and the current replica context."""

from __future__ import annotations

from typing import Any

from mpistrat import context
from mpistrat.strategy.default import default_mode
from mpistrat.strategy.replica_context import ReplicaContext
from mpistrat.strategy.strategy import Strategy

context.set_default(default_mode)


def get_strategy() -> Strategy:
    """Return the current strategy: the default strategy outside of every scope.

    Examples
    --------
    >>> get_strategy().num_replicas_in_sync
    1
    """
    return context.current().strategy


def has_strategy() -> bool:
    """Return whether a strategy other than the default one is current.

    Examples
    --------
    >>> has_strategy()
    False
    """
    return context.current().strategy is not default_mode().strategy


def get_replica_context() -> ReplicaContext | Any:
    """Return the current replica context, or None in cross-replica context.

    Examples
    --------
    >>> get_replica_context().num_replicas_in_sync
    1
    """
    return context.current().replica_context  # Any rather than None: a replica's function need not ask for None


def in_cross_replica_context() -> bool:
    """Return whether the current context is a cross-replica context.

    Examples
    --------
    >>> in_cross_replica_context()
    False
    """
    return context.current().replica_context is None


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Make a strategy current in this thread without a ``with`` block. None leaves it again.

    Raises
    ------
    RuntimeError
        If a ``with strategy.scope()`` is active.
    TypeError
        If ``strategy`` is neither a strategy nor None.

    Examples
    --------
    >>> import mpistrat
    >>> experimental_set_strategy(mpistrat.OneDeviceStrategy("cpu:0"))
    >>> has_strategy()
    True
    >>> experimental_set_strategy(None)
    """
    if strategy is not None and not isinstance(strategy, Strategy):
        raise TypeError(f"experimental_set_strategy() takes a strategy or None, not {strategy!r}")
    stack = context.stack()
    if stack and not (len(stack) == 1 and isinstance(stack[0], _Set)):
        raise RuntimeError(
            "Must not be called inside a strategy scope: leave `with strategy.scope()` before you set another"
        )
    stack.clear()
    if strategy is not None and strategy is not default_mode().strategy:
        stack.append(_Set(strategy))


class _Set(context.Mode):
    """The mode that `experimental_set_strategy` entered."""

    __slots__ = ()
