"""The state that a program keeps for its next run: copies in memory, and checkpoints in a directory."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from mpistrat.engine import Engine
from mpistrat.training.checkpoint.checkpoint import Checkpoint
from mpistrat.training.checkpoint.kept_checkpoints import CheckpointManager
from mpistrat.training.elastic.copying import Copying
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
