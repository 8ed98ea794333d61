"""Which strategy is current, and in which context: a stack of modes per thread.

The empty stack is the *default mode*: the default strategy, in its replica context. This file
knows no class of the package; the package ``strategy`` says what the default mode is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol


class AnyStrategy(Protocol):
    """A strategy, as the rooms below the package ``strategy`` see it.

    `mpistrat.Strategy` has these members, and says what they do.
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
    """A strategy and exactly one of cross-replica context and a replica context.

    ``replica_context`` is None in cross-replica context. ``update_replica_id`` is the replica
    whose component an update function may write, None outside of updates.
    """

    __slots__ = ("replica_context", "strategy", "update_replica_id")

    def __init__(self, strategy: Any, replica_context: Any = None, update_replica_id: int | None = None):
        self.strategy = strategy
        self.replica_context = replica_context
        self.update_replica_id = update_replica_id


class _Stack(threading.local):
    def __init__(self) -> None:
        self.stack: list[Mode] = []


_local = _Stack()
_default: Callable[[], Mode] | None = None


def set_default(default: Callable[[], Mode]) -> None:
    """Say what the mode of an empty stack is."""
    global _default
    _default = default


def stack() -> list[Mode]:
    """The modes of this thread, the current one last."""
    return _local.stack


def current() -> Mode:
    """The current mode, never None."""
    modes = _local.stack
    if modes:
        return modes[-1]
    assert _default is not None
    return _default()


def is_default() -> bool:
    """Whether no strategy was entered in this thread."""
    return not _local.stack
