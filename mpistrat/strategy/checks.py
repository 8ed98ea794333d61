"""Checks that a call is made in the right context."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from mpistrat import context


def mixing(current: object, wanted: object) -> NoReturn:
    """Raise the RuntimeError for a call to one strategy while another is current."""
    raise RuntimeError(
        f"Mixing different tf.distribute.Strategy objects: {current!r} is current, and this call belongs to "
        f"{wanted!r}. Leave the scope of the first, or use one strategy object throughout"
    )


def require_cross_replica(strategy: object, method: str, instead: str) -> None:
    """Raise in a replica context, and while another strategy is current. The default strategy may be current."""
    if context.is_default():
        return
    mode = context.current()
    if mode.strategy is not strategy:
        mixing(mode.strategy, strategy)
    if mode.replica_context is not None:
        raise RuntimeError(
            f"Method requires being in cross-replica context, use get_replica_context().merge_call(): {method} "
            f"was called in a replica context; {instead}"
        )


def require_scope(strategy: object) -> None:
    """Raise unless this strategy is the current one."""
    mode = context.current()
    if mode.strategy is not strategy:
        if context.is_default():
            raise RuntimeError('Need to be inside "with strategy.scope()" of ' + repr(strategy))
        mixing(mode.strategy, strategy)


def require_replica_context(replica_context: Any) -> None:
    """Raise unless this replica context is the current one."""
    mode = context.current()
    if mode.replica_context is replica_context:
        return
    if mode.replica_context is None:
        raise RuntimeError("Need to be inside `call_for_each_replica()`: call it in a function that strategy.run runs")
    if mode.strategy is replica_context.strategy:
        raise RuntimeError("Mismatching ReplicaContext.")
    raise RuntimeError(
        "Mismatching tf.distribute.Strategy objects: the replica context belongs to "
        f"{replica_context.strategy!r}, and {mode.strategy!r} is current"
    )


def checked_replica(name: str, replica: object, size: int) -> int:
    """Return the number of one of ``size`` replicas. Raise TypeError if it is not an int, and ValueError for others."""
    if isinstance(replica, bool) or not isinstance(replica, (int, np.integer)):
        raise TypeError(f"{name} must be the number of a replica, not {replica!r}")
    if not 0 <= replica < size:
        raise ValueError(f"{name} must be one of the replicas 0 to {size - 1}, not {replica}")
    return int(replica)  # ranks compare it: one may give a NumPy scalar
