"""The settings of a job that is told to stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class TerminationConfig:
    """How a `PreemptionCheckpointHandler` learns that the job will end, and what it does then.

    Parameters
    ----------
    termination_watcher_fn : callable, optional
        ``termination_watcher_fn() -> bool``: whether this rank will end soon. Every rank calls it at each step, so it
        should be fast. Signals and the time limit of the job count in addition.
    exit_fn : callable, optional
        Called on every rank after the checkpoint is written. If it returns, training continues. By default replica 0
        requeues a Slurm job, and all ranks end.
    grace_period : float, optional
        Seconds between the notice and the end. A checkpoint is written at once, training continues, and a second
        checkpoint is written shortly before the end. By default 0: one checkpoint, then the exit.
    save_fn : callable, optional
        Called on every rank to save, in place of saving the handler's checkpoint.

    Raises
    ------
    TypeError
        If a function is not callable.
    ValueError
        If ``grace_period`` is negative.

    Examples
    --------
    >>> TerminationConfig(exit_fn=lambda: None, grace_period=30).grace_period
    30.0
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be a function, not {function!r}")
        seconds = 0.0 if self.grace_period is None else float(self.grace_period)
        if not seconds >= 0:
            raise ValueError(f"grace_period must be 0 or a positive number of seconds, not {self.grace_period!r}")
        self.grace_period = seconds
