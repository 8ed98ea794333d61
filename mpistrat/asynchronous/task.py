"""A task: one call of a function by a worker, or by several together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mpistrat.messages.functions import SentFunction
from mpistrat.messages.pickling import Packed


@dataclass(eq=False, slots=True)
class Task:
    """One call of a function by any worker, in the scope of the strategy of the number ``strategy``.

    ``owner`` is the coordinator or executor, and ``kept`` lives until the task has ended. ``began()`` is called when a
    worker gets it, and returns False if it was cancelled. ``ended`` gets the result and the error, of which one is
    None, or both then. So many ``ranks`` call the function with their communicator; the result is that of its rank 0.
    After ``seconds`` the worker raises TimeoutError. ``once`` says whether its writes are kept until its end and
    applied once. A chunk has several ``calls``.
    """

    function: SentFunction
    arguments: Packed
    strategy: int | None
    owner: object
    kept: object
    ended: Callable[[Any, BaseException | None], None]
    began: Callable[[], bool] | None = None
    ranks: int | None = None
    seconds: float | None = None
    once: bool = False
    calls: int = 1
    number: int = field(default=-1, init=False)
    running: list[int] = field(default_factory=list, init=False)  # ranks that have not told how it ended
    workers: tuple[int, ...] = field(default=(), init=False)
    value: Any = field(default=None, init=False)
    error: BaseException | None = field(default=None, init=False)
    failed_at: float | None = field(default=None, init=False)

    @property
    def light(self) -> bool:
        """Whether no large array travels with it. Receiving one lasts until the coordinator makes progress."""
        return not (self.arguments.buffers or self.function.packed.buffers)

    def hand_to(self, number: int, ranks: list[int]) -> tuple[Any, ...]:
        """Note which ranks get it. Return what they are told."""
        self.number, self.running, self.workers = number, ranks, tuple(ranks)
        together = None if self.ranks is None else self.workers
        return number, self.function.digest, self.strategy, together, self.seconds, self.once

    def take(self, rank: int, value: Any, error: BaseException | None) -> bool:
        """Take the result of the first rank, or the first error. Return whether the task has ended on all ranks."""
        self.running.remove(rank)
        if error is not None and self.error is None:
            self.value, self.error, self.failed_at = None, error, time.monotonic()
        elif self.error is None and rank == self.workers[0]:
            self.value = value
        return not self.running
