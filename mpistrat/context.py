"""The current strategy and context of each thread, as a stack of modes.

The empty stack is the *default mode*: the default strategy, in its replica context. The package ``strategy`` sets the
default mode by `set_default`, so that this file imports none of its classes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn, Protocol


class AnyStrategy(Protocol):
    """The interface of a strategy for the packages below ``strategy``.

    `mpistrat.Strategy` documents these members.
    """

    @property
    def extended(self) -> Any: ...

    @property
    def num_replicas_in_sync(self) -> int: ...

    @property
    def scope(self) -> Callable[[], Any]: ...

    @property
    def run(self) -> Callable[..., Any]: ...

    @property
    def reduce(self) -> Callable[..., Any]: ...

    @property
    def gather(self) -> Callable[..., Any]: ...


class Mode:
    """A strategy, in cross-replica context or in a replica context.

    ``replica_context`` has the value None in cross-replica context. ``update_replica_id`` is the replica whose
    component an update function may write; None outside updates.
    """

    __slots__ = ("replica_context", "strategy", "update_replica_id")

    def __init__(self, strategy: Any, replica_context: Any = None, update_replica_id: int | None = None):
        self.strategy = strategy
        self.replica_context = replica_context
        self.update_replica_id = update_replica_id


class entered:
    """A context in which some modes are entered, the last one current. Those that its body left open end with it.

    It takes 0.6 us more than the same written out, as in `Strategy.run`, `merge_call` and updates.
    """

    __slots__ = ("_depth", "_modes")

    def __init__(self, *modes: Mode):
        self._modes = modes

    def __enter__(self) -> None:
        modes = local.stack
        self._depth = len(modes)
        modes += self._modes

    def __exit__(self, *exc_info: object) -> None:
        del local.stack[self._depth :]  # not pop: a function that failed may have left contexts behind


class _Stack(threading.local):
    def __init__(self) -> None:
        self.stack: list[Mode] = []


local = _Stack()  # read directly where a call would take too long
_default: Callable[[], Mode] | None = None


def set_default(default: Callable[[], Mode]) -> None:
    """Set the function that returns the mode of an empty stack."""
    global _default
    _default = default


def stack() -> list[Mode]:
    """Return the modes of this thread, the current mode last."""
    return local.stack


def current() -> Mode:
    """Return the current mode."""
    modes = local.stack
    if modes:
        return modes[-1]
    assert _default is not None
    return _default()


def is_default() -> bool:
    """Return whether this thread is in the default mode: it has not entered a strategy."""
    return not local.stack


# --- checks that a call is made in the right context ----------------------------------


def mixing(current: object, wanted: object) -> NoReturn:
    """Raise the RuntimeError for a call to one strategy while another is current."""
    raise RuntimeError(
        f"Mixing different tf.distribute.Strategy objects: {current!r} is current, and this call belongs to "
        f"{wanted!r}. Leave the scope of the first, or use one strategy object throughout"
    )


def require_cross_replica(strategy: object, method: str, instead: str) -> None:
    """Raise in a replica context, and while another strategy is current. The default strategy may be current."""
    if is_default():
        return
    mode = current()
    if mode.strategy is not strategy:
        mixing(mode.strategy, strategy)
    if mode.replica_context is not None:
        raise RuntimeError(
            f"Method requires being in cross-replica context, use get_replica_context().merge_call(): {method} "
            f"was called in a replica context; {instead}"
        )


def require_scope(strategy: object) -> None:
    """Raise unless this strategy is the current one."""
    mode = current()
    if mode.strategy is not strategy:
        if is_default():
            raise RuntimeError('Need to be inside "with strategy.scope()" of ' + repr(strategy))
        mixing(mode.strategy, strategy)


def require_replica_context(replica_context: Any) -> None:
    """Raise unless this replica context is the current one."""
    mode = current()
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
