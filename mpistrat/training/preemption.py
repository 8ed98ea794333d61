"""The handler that saves on all ranks when any of them is told to stop, and ends the program."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpistrat.cluster_resolver.compare import resolved_once
from mpistrat.context import require_cross_replica
from mpistrat.engine import Engine
from mpistrat.process import mpi
from mpistrat.replicas import ReplicaGroup
from mpistrat.runtime.environment import rc
from mpistrat.runtime.topology import Topology
from mpistrat.strategy import Variable, get_strategy, has_strategy
from mpistrat.training import preemption_exit
from mpistrat.training.checkpoint.by_all import finish_all
from mpistrat.training.checkpoint.checkpoint import Checkpoint
from mpistrat.training.checkpoint.kept_checkpoints import CheckpointManager
from mpistrat.training.checkpoint.names import named_variables
from mpistrat.training.checkpoint.variables import load, save
from mpistrat.training.elastic_copies import Copying
from mpistrat.training.preemption_exit import PreemptionWatcher

FILE = "preemption.h5"
_COUNT = "PreemptionCheckpointHandler.total_run_calls"
_STEPS = 20  # whose durations are kept
_SHARE_OF_COPIES = 0.01  # of the time
_MARGIN = 15.0  # minimum seconds before a time limit to stop

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class TerminationConfig:
    """The options of a `PreemptionCheckpointHandler`: how it learns that the job will end, and how it ends.

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
    keep_in_memory : bool
        Whether `mpistrat run --elastic` goes on from copies in memory of what the handler saves.

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
    keep_in_memory: bool = True

    def __post_init__(self) -> None:
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be a function, not {function!r}")
        seconds = 0.0 if self.grace_period is None else float(self.grace_period)
        if not seconds >= 0:
            raise ValueError(f"grace_period must be 0 or a positive number of seconds, not {self.grace_period!r}")
        self.grace_period = seconds


class StepTimes:
    """The durations of the last steps, and of the last checkpoint, by the clock ``now`` in seconds.

    The first step is often slow (compilation, cold caches). It counts only until the second step.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._last: float | None = None  # time of the last check or save
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._first_step_only = True
        self._save = 0.0

    @property
    def is_known(self) -> bool:
        """Whether the duration of a step is known."""
        return bool(self._steps)

    @property
    def needed(self) -> float:
        """The seconds for another step and a checkpoint, doubled as a reserve."""
        return 2 * (self._save + max(self._steps, default=0.0))

    def check(self) -> None:
        """Record the time since the last check or save as a step."""
        now = self._now()
        if self._last is not None:
            if self._first_step_only and self._steps:
                # The first step is dropped when there is a second one.
                self._steps.clear()
                self._first_step_only = False
            self._steps.append(now - self._last)
        self._last = now

    def saved(self, seconds: float) -> None:
        """Record the duration of a checkpoint, which is not a part of the next step."""
        self._save = seconds
        self._last = self._now()

    def begin_anew(self) -> None:
        """Do not count the time until the next check as a step."""
        self._last = None


class Notice(NamedTuple):
    """The knowledge of one rank about the coming end of the job.

    ``comes_back`` says whether the job may requeue itself. It is False after SIGTERM: a cancelled job should not come
    back, and Slurm usually requeues a preempted job itself.
    """

    text: str
    comes_back: bool


class PreemptionCheckpointHandler:
    """The handler that saves on all ranks at the same step when any is told to stop, and ends the program.

    It watches for SIGTERM, SIGUSR1 and SIGUSR2, for the time limit of a Slurm job, and for what
    ``termination_config`` says. At the beginning of each `run` the ranks agree on whether any of them was told to
    stop, which costs one small all-reduce. If so, they save, replica 0 requeues a Slurm job, and all end. The
    restarted program loads the checkpoint when it creates its handler. A run that is told to stop before its first
    step is complete fails instead: otherwise the job would be requeued forever.

    Parameters
    ----------
    cluster_resolver : ClusterResolver or None
        Only checked: a cluster with parameter servers raises NotImplementedError. The ranks communicate by MPI.
    checkpoint_or_checkpoint_manager : mapping of name to Variable, iterable of Variable, Checkpoint, manager, callable
        What to save. Variables are saved to ``preemption.h5`` in ``checkpoint_dir``; the constructor loads them if
        that file exists. A `Checkpoint` is kept in ``checkpoint_dir`` by a `CheckpointManager`. A manager has a method
        ``save()``, and optionally ``restore_or_initialize()``, which the constructor calls. Every rank calls both. A
        callable is called on every rank to save; the program restores.
    checkpoint_dir : path, optional
        A directory that all runs of the program see. It is created if it does not exist.
    termination_config : TerminationConfig, optional

    Raises
    ------
    TypeError
        If the second argument cannot be saved, or ``termination_config`` is not a TerminationConfig.
    ValueError
        If variables or a Checkpoint are given without ``checkpoint_dir``, or the checkpoint does not fit the variables.
    NotImplementedError
        If the cluster has parameter servers.
    OSError
        If ``checkpoint_dir`` cannot be written or created.
    RuntimeError
        If it is not created in the main thread.

    Examples
    --------
    >>> import mpistrat, tempfile
    >>> from mpistrat.experimental import PreemptionCheckpointHandler
    >>> folder = tempfile.TemporaryDirectory()
    >>> with mpistrat.MultiWorkerMirroredStrategy().scope():
    ...     v = mpistrat.Variable(0.0, name="v")
    >>> handler = PreemptionCheckpointHandler(None, [v], folder.name)
    >>> for step in range(handler.total_run_calls, 3):
    ...     _ = handler.run(v.assign_add, 1.0)
    >>> float(v), handler.total_run_calls
    (3.0, 3)
    >>> folder.cleanup()
    """

    def __init__(
        self,
        cluster_resolver: Any,
        checkpoint_or_checkpoint_manager: Any,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
    ):
        if termination_config is not None and not isinstance(termination_config, TerminationConfig):
            raise TypeError(f"termination_config must be a TerminationConfig, not {termination_config!r}")
        self._config = termination_config or TerminationConfig()
        self._strategy: Any = get_strategy() if has_strategy() else None
        self._runs: Any = np.zeros((), np.int64)
        restore: Callable[[], Any] | None = None
        target: Any = checkpoint_or_checkpoint_manager
        checkpoint: Any = getattr(target, "checkpoint", None)  # of a manager
        if isinstance(target, Checkpoint):
            checkpoint = target
            if checkpoint_dir is None:
                raise ValueError("a Checkpoint is saved in a directory: give checkpoint_dir=, which all runs see")
            target = CheckpointManager(target, checkpoint_dir, max_to_keep=1)
        if callable(getattr(target, "save", None)):
            self._save_fn: Callable[..., Any] = target.save
            restore = getattr(target, "restore_or_initialize", None)
        elif callable(target) and not isinstance(target, Variable):
            self._save_fn = target
        elif checkpoint_dir is None:
            raise ValueError("variables are saved in a directory: give checkpoint_dir=, which all runs see")
        else:
            variables = self._variables_of(target)
            checkpoint = Checkpoint(variables)
            restore = self._keep_variables(variables, Path(checkpoint_dir))
        if self._config.save_fn is not None:
            self._save_fn = self._config.save_fn
        if self._strategy is None:
            self._topology = Topology.of(mpi.start().COMM_WORLD)
            self._replicas = ReplicaGroup(self._topology)
        else:
            engine: Engine = self._strategy.extended.engine
            groups = engine.between_groups
            if groups is not None and groups.sync_every > 1:
                raise ValueError(
                    f"weights of groups are equal after every {groups.sync_every} steps only: save them by the "
                    "program, after an exchange"
                )
            self._topology, self._replicas = engine.all_ranks, engine.replicas
        _refuse_parameter_servers(cluster_resolver, self._topology)
        self._watcher = PreemptionWatcher()
        self._notices: Any = None  # of an end that is agreed on, during the grace period
        self._deadline = 0.0
        self._watches_time = True
        self._times = StepTimes()
        self._progress = False  # whether this run of the program completed a step
        if restore is not None:
            restore()
        self._copying: Copying | None = None
        self._ended = 0  # steps, of all runs
        if self._config.keep_in_memory and isinstance(checkpoint, Checkpoint):
            self._copying = Copying(checkpoint, self._topology, _SHARE_OF_COPIES)
            self._ended = self._copying.restore(0)
        elif self._config.keep_in_memory and rc.elastic and self._replicas.is_chief:
            _log.warning("after a loss this job goes on from files alone: a function or a manager of its own saves it")

    @property
    def total_run_calls(self) -> int:
        """The number of calls of `run` that returned, in all runs of the program.

        With a manager or a callable only this run of the program counts.
        """
        return int(self._runs)

    def run(self, distributed_train_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Save and end if any rank was told to stop; else call a function, and count the call.

        All ranks call it the same number of times. The function should be one training step: a notice is handled
        only after it returns.

        Parameters
        ----------
        distributed_train_function : callable
        *args, **kwargs
            The arguments of the function.

        Returns
        -------
        Any
            The result of the function.

        Raises
        ------
        RuntimeError
            In a replica context.
        """
        self._check((), {})
        result = distributed_train_function(*args, **kwargs)
        if isinstance(self._runs, Variable):
            self._runs.assign_add(1)
        else:
            self._runs += 1
        self._step_ended()
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Save and end if any rank was told to stop: for loops that do not use `run`.

        All ranks call it the same number of times, at the end of each step.

        Parameters
        ----------
        *args, **kwargs
            The arguments of the function that saves.

        Raises
        ------
        TypeError
            If there are arguments, but variables are saved, which takes no arguments.
        """
        if (args or kwargs) and isinstance(self._runs, Variable) and self._config.save_fn is None:
            raise TypeError(
                f"variables are saved without arguments, not with {args or kwargs}: give a function that saves, or "
                "TerminationConfig(save_fn=...)"
            )
        self._step_ended()
        self._check(args, kwargs)

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Provide a context at whose end the ranks save and end the program if any was told to stop.

        All ranks enter and leave the context. An exception passes through it, and no checkpoint is saved then.
        """
        yield
        self._step_ended()
        self._check((), {})

    # --- what is saved ---------------------------------------------------------------

    def _step_ended(self) -> None:
        self._progress = True
        self._ended += 1
        if self._copying is not None and self._copying.active and self._ended >= self._copying.next:
            self._copying.copy(self._ended)

    def _variables_of(self, structure: Any) -> dict[str, Variable]:
        """Return the variables to save, and the counter of runs."""
        variables = named_variables(structure)
        self._strategy = next(iter(variables.values())).distribute_strategy
        with self._strategy.scope():
            self._runs = variables[_COUNT] = Variable(np.zeros((), np.int64), trainable=False, name=_COUNT)
        return variables

    def _keep_variables(self, variables: dict[str, Variable], directory: Path) -> Callable[[], None]:
        """Let ``_save_fn`` save these variables. Return the function that restores them."""
        path = directory / FILE

        def save_variables() -> None:
            self._topology.on_first(lambda: directory.mkdir(parents=True, exist_ok=True))
            save(variables, path)

        def restore() -> None:
            if self._config.save_fn is None:
                self._topology.on_first(lambda: _require_writable(directory))
            # Rank 0's answer: another node may see the directory later.
            if self._topology.on_first(path.exists):
                load(variables, path)
                if self._replicas.is_chief:
                    _log.warning("continuing after run %d with the variables in %s", self.total_run_calls, path)

        self._save_fn = save_variables
        return restore

    # --- when it is saved ------------------------------------------------------------

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._strategy is not None:
            require_cross_replica(self._strategy, "run", "call it outside of strategy.run")
        self._times.check()
        if self._notices is None:
            if not self._notified():
                return
            now = time.monotonic()
            self._save(args, kwargs)
            grace = self._config.grace_period
            if grace:
                left = self._seconds_left()
                grace = grace if left is None else min(grace, left)
                self._deadline = now + grace
                return
        else:
            if not self._grace_is_over():
                return
            self._save(args, kwargs)
        self._leave()

    def _grace_is_over(self) -> bool:
        """Return whether the second checkpoint is due: by the clock of replica 0, or because of SIGTERM."""
        over = self._replicas.is_chief and time.monotonic() >= self._deadline - self._times.needed
        # If SIGTERM began the grace period, it may reach other ranks later: then it does not end the period.
        began_with_it = not all(notice.comes_back for notice in self._notices.values())
        cut_short = not began_with_it and signal.SIGTERM in self._watcher.signals
        if self._topology.all_true(not (over or cut_short)):
            return False
        for rank, was_cut in enumerate(self._topology.all_gather_object(cut_short)):
            if was_cut:
                self._notices[rank] = Notice("SIGTERM", False)
        return True

    def _notified(self) -> bool:
        """Return whether any rank was told to stop. If so, share the notices of all ranks."""
        notice = self._own_notice()
        if self._topology.all_true(notice is None):
            return False
        # Only now: a step without a notice costs one small all-reduce.
        of_ranks = self._topology.all_gather_object(notice and tuple(notice))
        self._notices = {rank: Notice(*fields) for rank, fields in enumerate(of_ranks) if fields is not None}
        return True

    def _own_notice(self) -> Notice | None:
        message = self._watcher.preemption_message
        if message is not None:
            # SIGUSR1 and SIGUSR2 come from `sbatch --signal`, which leaves the requeueing to the job.
            return Notice(message, self._watcher.signals[0] != signal.SIGTERM)
        watcher_fn = self._config.termination_watcher_fn
        if watcher_fn is not None and watcher_fn():
            return Notice("termination_watcher_fn", True)
        left = self._seconds_left()
        if left is None or not self._times.is_known or not self._watches_time:
            return None
        if left < _MARGIN + self._times.needed:
            return Notice(f"{left:.0f} s before the end of the job's time", True)
        return None

    def _seconds_left(self) -> float | None:
        """Return the seconds left of the job, on replica 0 only: clocks differ between nodes."""
        return preemption_exit.seconds_left(os.environ) if self._replicas.is_chief else None

    def _save(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        start = time.monotonic()
        self._save_fn(*args, **kwargs)
        finish_all()  # the function may have called save_async
        self._topology.barrier()  # no rank ends the job while another one writes
        self._times.saved(time.monotonic() - start)

    def _leave(self) -> None:
        notices, self._notices = self._notices, None
        comes_back = all(notice.comes_back for notice in notices.values())
        if self._replicas.is_chief:
            rank, notice = next(iter(notices.items()))
            _log.warning(
                "rank %d was told to stop (%s): all %d ranks saved after run %d",
                rank,
                notice.text,
                sum(self._topology.ranks_per_node),
                self.total_run_calls,
            )
        if self._config.exit_fn is not None:
            self._config.exit_fn()
            self._watcher.clear()
            self._watches_time = False  # else every further step would save again
            self._times.begin_anew()
            return
        status = None
        if self._replicas.is_chief:
            status, why = preemption_exit.end(os.environ, comes_back=comes_back, progress=self._progress)
            _log.warning("%s", why)
        # Rank 0 alone has asked Slurm: all ranks end with its status.
        preemption_exit.leave(self._topology.broadcast_object(status))


def _require_writable(directory: Path) -> None:
    """Raise OSError unless the directory can be written or created: now, not after hours of work."""
    try:
        # The first folder above that exists: the others will be created in it.
        existing = next(folder for folder in (directory, *directory.absolute().parents) if folder.exists())
        if not existing.is_dir():
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(existing, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        text = f"{error.strerror}, so checkpoints could not be written; give another checkpoint_dir"
        raise OSError(error.errno, text, str(directory)) from None


def _refuse_parameter_servers(cluster_resolver: Any, topology: Topology) -> None:
    if cluster_resolver is None:
        return
    try:
        jobs = resolved_once(cluster_resolver, topology).cluster_spec().jobs
    except RuntimeError:  # the resolver does not know where all ranks are
        return
    if "ps" in jobs:
        raise NotImplementedError(
            f"the cluster has tasks of {jobs}: PreemptionCheckpointHandler works where all ranks train, "
            "without parameter servers"
        )
