"""The times at which a program's state is copied to memory, and its way back in the next run."""

from __future__ import annotations

import itertools
import logging
import math
import time
from pathlib import Path

from mpistrat.process import standby
from mpistrat.runtime.environment import rc
from mpistrat.runtime.topology import Topology
from mpistrat.training.checkpoint import write
from mpistrat.training.checkpoint.checkpoint import Checkpoint
from mpistrat.training.checkpoint.variables import arrays_of
from mpistrat.training.elastic import copies
from mpistrat.training.elastic.copies import MemoryCopies

_numbers = itertools.count()
_log = logging.getLogger(__name__)


class Copying:
    """Copies of the objects of a checkpoint, where ``mpistrat run --elastic`` runs the program; else nothing.

    ``share`` is the part of the time that copies may take, and ``seconds`` what they have taken. Methods are
    collective.
    """

    def __init__(self, checkpoint: Checkpoint, topology: Topology, share: float):
        self._checkpoint, self._topology, self._share = checkpoint, topology, share
        folder = rc.elastic
        # One for each object that makes copies: a program may have two loops, one after the other.
        self._folder = Path(folder, str(next(_numbers))) if folder else None
        self._copies = MemoryCopies(self._folder, topology, rc.restart) if self._folder is not None else None
        self.seconds = 0.0
        self._last = time.monotonic(), 0  # the end of the last copy, and its step
        self.next = 1  # the step after which the next copy is made

    @property
    def active(self) -> bool:
        """Whether there are copies."""
        return self._copies is not None

    @property
    def steps(self) -> list[int]:
        """The steps of the whole copies of this run, the newest last."""
        return [*self._copies.steps] if self._copies is not None else []

    def restore(self, step: int) -> int:
        """Restore the newest copy of earlier runs if its step is above ``step``. Return the step of the state."""
        if self._folder is not None:
            path = copies.restored_file(self._folder, rc.restart)
            copied = copies.newest(self._folder, self._topology, rc.restart)
            if copied is not None and copied[0] > step:
                # By a file, which `Checkpoint.restore` reads. It stays: an optimizer makes its slots at the first step.
                try:
                    self._topology.on_first(lambda: write.write(copied[1] or {}, path))
                except OSError as error:
                    _log.warning("the copy of step %d is not used: %s", copied[0], error)
                else:
                    self._checkpoint.restore(path)
                    step = copied[0]
        self._last = time.monotonic(), step
        self.next = step + 1
        return step

    def copy(self, step: int) -> None:
        """Copy the state after ``step``, and let the ranks agree on the next step at which they do."""
        if self._copies is None:
            return
        if not self.seconds:
            # After the first step the program has imported its modules: a standby process imports them in advance.
            standby.note_imports(Path(rc.elastic), rc.restart, self._topology.rank)
        began = time.monotonic()
        state, own = self._checkpoint.contents("a copy in memory", step)
        topology, arrays = arrays_of(state, own or None, "a copy in memory", step)
        why = ""
        if arrays is None:
            why = "some of it is shared out over the ranks"
        else:
            try:
                self._copies.write(step, arrays)
            except OSError as error:
                why = str(error)
        if why:
            # For the rest of this run: the next copy would fail in the same way.
            self._copies = None
            if topology.rank == 0:
                _log.warning("the state is not copied to the memory of nodes, only saved in files: %s", why)
            return
        took = time.monotonic() - began
        self.seconds += took
        before, last = self._last
        # The wait after which ``took / (took + wait * of_a_step)`` is the share.
        of_a_step = max(began - before, 1e-6) / (step - last)
        wait = math.ceil(took * (1 / self._share - 1) / of_a_step)
        # By rank 0's clock: the ranks must copy after the same step.
        self.next = step + max(1, topology.broadcast_object(wait))
        self._last = time.monotonic(), step
