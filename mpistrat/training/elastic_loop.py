"""A training loop that goes on in the next run of a program that has lost a rank, and the state that it keeps."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpistrat.data import AutoShardPolicy, Dataset
from mpistrat.engine import Engine
from mpistrat.runtime.environment import rc
from mpistrat.strategy import Variable, get_strategy
from mpistrat.training.checkpoint.checkpoint import Checkpoint
from mpistrat.training.checkpoint.kept_checkpoints import CheckpointManager
from mpistrat.training.elastic_copies import Copying
from mpistrat.training.preemption import PreemptionCheckpointHandler, TerminationConfig

_BETWEEN_LOOKS = 1.0  # seconds


class ElasticState:
    """The state of a program, copied and saved after steps, and restored when the next run makes this object.

    A checkpoint is saved every ``every_seconds``, at a notice that the job will end, and by `finish`. ``objects`` are
    as for `Checkpoint`. All methods are collective.
    """

    def __init__(
        self,
        objects: dict[str, Any],
        directory: str | os.PathLike[str],
        every_seconds: float,
        copy_share: float,
        strategy: Any,
    ):
        if not 0 < copy_share <= 1:
            raise ValueError(f"copy_share must be above 0 and at most 1, not {copy_share!r}")
        engine: Engine = strategy.extended.engine
        self._topology, self._every = engine.all_ranks, every_seconds
        self._ended = np.zeros(1, np.int64)  # in the checkpoint: the steps that have ended
        self.checkpoint = Checkpoint(loop=self._ended, **objects)
        manager = CheckpointManager(self.checkpoint, directory, max_to_keep=2)
        with strategy.scope():
            config = TerminationConfig(keep_in_memory=False)  # the copies are made here
            self._handler = PreemptionCheckpointHandler(None, manager, termination_config=config)  # restores
        self._manager = manager
        self._saved = self.step  # the step of the newest checkpoint
        self.copying = Copying(self.checkpoint, self._topology, copy_share)
        # After the checkpoint, and only if the copy is newer.
        self.copying.restore(self.step)
        self._looked = time.monotonic(), self.step  # when the ranks agreed on what is due, and after which step
        self._next = self.step + 1  # the step after which they do so again
        self._last_save = self._looked[0]

    @property
    def step(self) -> int:
        """The steps that have ended, in all runs."""
        return int(self._ended[0])

    def advance(self) -> None:
        """Count a step that has ended. Copy or save the state if that is due."""
        self._ended += 1  # in place: the checkpoint holds this array
        self._handler.save_checkpoint_if_preempted()
        if self.copying.active and self.step >= self.copying.next:
            self.copying.copy(self.step)
        if self.step >= self._next:
            self._save_if_due()

    def finish(self) -> None:
        """Save the state, unless it was saved after the last step."""
        if self._saved != self.step:
            self._manager.save()
            self._saved = self.step

    def _save_if_due(self) -> None:
        """Save a checkpoint after ``every_seconds``, and agree on the step of the next look at the clock."""
        now, (before, last) = time.monotonic(), self._looked
        of_a_step = max(now - before, 1e-6) / (self.step - last)
        decision = max(1, int(_BETWEEN_LOOKS / of_a_step)), now - self._last_save >= self._every
        # The clocks of ranks differ: rank 0 decides for all.
        steps, saves = self._topology.broadcast_object(decision)
        if saves:
            self._manager.save()
            self._saved = self.step
            self._last_save = time.monotonic()
        self._looked = time.monotonic(), self.step
        self._next = self.step + steps


# --- the loop --------------------------------------------------------------------------------------------

_OWN = ("batches", "loop")  # names in the checkpoint
_running: weakref.WeakSet[ElasticLoop] = weakref.WeakSet()  # loops that have not ended


class ElasticLoop:
    """The batches of some epochs, and the state of the program, from which the next run goes on after a loss.

    Iterate over it once. When the body of a step has ended, the state is copied to the memory of each node, as often as
    copies take ``copy_share`` of the time. If ``mpistrat run --elastic`` runs the program, the next run goes on after
    the newest whole copy; with ``virtual_replicas`` it gets the weights of a run without a loss, bit for bit, on any
    number of ranks. A checkpoint is saved in ``directory`` every ten minutes, at a notice that the job will end, as by
    `PreemptionCheckpointHandler`, and at the end of the last epoch. Without ``--elastic`` there are only these.

    The constructor is collective. It restores the newest copy, or the newest checkpoint if that is newer.

    Parameters
    ----------
    dataset : Dataset or DistributedDataset
        A Dataset is distributed by the strategy of the objects.
    epochs : int
    directory : path
        For checkpoints. All runs of the program and all nodes see it. It is created if it does not exist.
    every_seconds : float
        The time between two checkpoints.
    copy_share : float
        The part of the time that copies may take, above 0. With 1 each step is copied.
    **objects
        What the steps change, as for `mpistrat.training.Checkpoint`: variables, optimizers, metrics, random
        generators. Each is an attribute of the loop.

    Attributes
    ----------
    step : int
        The steps that have ended, in all runs and epochs.
    epoch : int
        The epoch of the batch, from 0.
    restarts : int
        How many runs of the program were lost before this one.
    seconds_in_copies : float
        The time that this run has taken for copies.

    Raises
    ------
    TypeError
        If an object cannot be saved.
    ValueError
        If there is no strategy, another loop that has not ended has the same objects, an object has the name of a part
        of the loop, a number is out of range, or the next run may have fewer ranks (``mpistrat run --elastic fewer``)
        and the result would depend on their number.
    OSError, DataFileError
        On every rank, if the directory cannot be written, or its newest checkpoint is damaged.

    Examples
    --------
    >>> import mpistrat, tempfile
    >>> import numpy as np
    >>> strategy = mpistrat.MultiWorkerMirroredStrategy(virtual_replicas=4)
    >>> with strategy.scope():
    ...     total = mpistrat.Variable(0.0, name="total")
    >>> folder = tempfile.TemporaryDirectory()
    >>> rows = mpistrat.data.Dataset.range(10).batch(4)
    >>> loop = mpistrat.experimental.ElasticLoop(rows, epochs=2, directory=folder.name, total=total)
    >>> for batch in loop:
    ...     rows_of_all = strategy.reduce("SUM", strategy.run(np.sum, args=(batch,)), axis=None)
    ...     _ = loop.total.assign_add(rows_of_all)
    >>> float(total), loop.step
    (90.0, 6)
    >>> folder.cleanup()
    """

    def __init__(
        self,
        dataset: Any,
        epochs: int,
        directory: str | os.PathLike[str],
        every_seconds: float = 600.0,
        copy_share: float = 0.005,
        **objects: Any,
    ):
        for name in objects:
            if name in _OWN or hasattr(type(self), name):
                raise ValueError(f"{name!r} is a name of ElasticLoop itself: give the object another name")
        self._leaves = leaves = Checkpoint(**objects).leaves()
        for other in _running:
            if any(mine is theirs for mine in leaves for theirs in other._leaves):
                raise ValueError("another ElasticLoop has the same objects, and has not ended: iterate over one only")
        self._epochs = epochs
        strategies = (leaf.distribute_strategy for leaf in leaves if isinstance(leaf, Variable))
        strategy: Any = next(strategies, get_strategy())
        if rc.elastic_ranks == "fewer":
            _require_any_number(strategy.extended.engine, dataset)
        if isinstance(dataset, Dataset):
            dataset = strategy.experimental_distribute_dataset(dataset)
            if isinstance(dataset, Dataset):
                raise ValueError("ElasticLoop: there is no strategy that distributes the dataset: use strategy.scope()")
        self._batches = dataset
        self._state = ElasticState({"batches": dataset, **objects}, directory, every_seconds, copy_share, strategy)
        self.restarts = rc.restart
        _running.add(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._state.checkpoint, name)

    @property
    def step(self) -> int:
        """The steps that have ended, in all runs and epochs."""
        return self._state.step

    @property
    def epoch(self) -> int:
        """The epoch of the batch, from 0."""
        return int(self._batches.state()["epoch"])

    @property
    def seconds_in_copies(self) -> float:
        """The time that this run has taken for copies."""
        return self._state.copying.seconds

    def copies(self) -> list[int]:
        """Return the steps of the copies in memory that this run has made, the newest last."""
        return self._state.copying.steps

    def __iter__(self) -> Iterator[Any]:
        """Return the batches that are left. Collective: each rank takes all of them."""
        if self not in _running:
            raise RuntimeError("this ElasticLoop has ended: make another one to go on")
        # A restored dataset goes on in the middle of its epoch.
        for _ in range(self.epoch, self._epochs):
            for batch in self._batches:
                yield batch
                # The program asks for the next batch when the body of the step has ended.
                self._state.advance()
        self._state.finish()
        _running.discard(self)


def _require_any_number(engine: Engine, dataset: Any) -> None:
    """Raise ValueError on every rank if the result of the program depends on the number of ranks."""
    why = ""
    if not engine.replicas.is_virtual:
        why = "the strategy has no virtual_replicas"
    elif isinstance(dataset, Dataset):
        policy = dataset.options().experimental_distribute.auto_shard_policy
        why = "AutoShardPolicy.FILE divides files by ranks" if policy is AutoShardPolicy.FILE else ""
    if why:
        raise ValueError(
            f"after a loss the program may run on fewer ranks, and would get other results: {why}; fix: give "
            "virtual_replicas=, or use --elastic same"
        )
