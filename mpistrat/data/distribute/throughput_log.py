"""Throughput of an epoch: a line in the log of rank 0.

The other ranks send their figures to rank 0 in messages that do not block. A rank that leaves its loop early, or does
not log, delays no other rank.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import nest
from mpistrat.process import mpi
from mpistrat.values import PerReplica

if TYPE_CHECKING:
    from mpistrat.runtime.topology import Topology

_log = logging.getLogger("mpistrat.data")
_TAG = 7301
_PATIENCE = 0.05  # seconds; the figures of a rank that is in step arrive sooner
_EPOCHS_KEPT = 16
_SLOWEST_SHOWN = 3

_mailboxes: weakref.WeakKeyDictionary[Any, Mailbox] = weakref.WeakKeyDictionary()


class ThroughputLog:
    """A counter of the samples and bytes of an iterator, and of the time that the program waits for them."""

    def __init__(self, ranks: Topology, dataset: int):
        self._ranks, self._dataset = ranks, dataset
        self._start = time.perf_counter()
        self._waited = 0.0
        self._samples = self._bytes = 0

    def got(self, batch: Any, waited: float) -> None:
        """Count a batch for which the program waited ``waited`` seconds."""
        self._waited += waited
        leaves: Any = [*batch.values()] if type(batch) is dict else batch if type(batch) is tuple else [batch]
        for leaf in leaves:
            if type(leaf) is not np.ndarray:
                leaves, _ = nest.flatten(batch)
                break
        if leaves and type(leaves[0]) is PerReplica:
            for each in zip(*(leaf.values for leaf in leaves), strict=True):
                self.got(each, 0.0)
            return
        self._samples += len(leaves[0]) if leaves and getattr(leaves[0], "ndim", 0) else 1
        for leaf in leaves:
            self._bytes += getattr(leaf, "nbytes", 0)

    def ended(self, epoch: int) -> None:
        """End the epoch of this rank: log the throughput on rank 0, send the figures on the others."""
        took = max(time.perf_counter() - self._start, 1e-9)
        mine = np.array([self._dataset, epoch, took, self._waited, self._samples, self._bytes], np.float64)
        if self._ranks.size == 1:
            _tell(epoch, {0: mine}, 1)
        elif hasattr(self._ranks, "world") and threading.current_thread() is threading.main_thread():
            key = getattr(self._ranks, "key", self._ranks)
            mailbox = _mailboxes.get(key)
            if mailbox is None:
                mailbox = _mailboxes[key] = Mailbox(self._ranks.world)
            if self._ranks.rank:
                mailbox.send(mine)
                return
            patience = _PATIENCE if _log.isEnabledFor(logging.INFO) else 0.0
            theirs = mailbox.received(self._dataset, epoch, patience)
            _tell(epoch, {0: mine, **theirs}, self._ranks.size)


class Mailbox:
    """The messages to rank 0 with the figures of the others. Used by the main thread only; never blocks."""

    def __init__(self, comm: Any):
        self._comm = comm
        self._sent: list[tuple[Any, np.ndarray]] = []
        self._received: dict[tuple[int, int], dict[int, np.ndarray]] = {}

    def send(self, figures: np.ndarray) -> None:
        """Start to send figures, and release the buffers of those that have arrived."""
        self._sent = [(request, kept) for request, kept in self._sent if not request.Test()]
        self._sent.append((self._comm.Isend(figures, 0, _TAG), figures))

    def received(self, dataset: int, epoch: int, patience: float) -> dict[int, np.ndarray]:
        """Return the figures of an epoch by rank, those that arrive within ``patience`` seconds."""
        until = time.monotonic() + patience
        key = (dataset, epoch)
        while True:
            self._take()
            if len(self._received.get(key, ())) == self._comm.size - 1 or time.monotonic() >= until:
                break
            time.sleep(0.001)
        found = self._received.pop(key, {})
        while len(self._received) > _EPOCHS_KEPT:
            del self._received[next(iter(self._received))]
        return found

    def _take(self) -> None:
        MPI = mpi.start()
        status = MPI.Status()
        while mpi.has_come(self._comm, MPI.ANY_SOURCE, _TAG, status):
            figures = np.empty(6, np.float64)
            self._comm.Recv(figures, status.source, _TAG)
            self._received.setdefault((int(figures[0]), int(figures[1])), {})[status.source] = figures


def _tell(epoch: int, figures: dict[int, np.ndarray], ranks: int) -> None:
    if not _log.isEnabledFor(logging.INFO):
        return
    table = np.array(list(figures.values()))
    took = table[:, 2].max()
    waiting = {rank: each[3] / each[2] for rank, each in figures.items()}
    slowest = sorted(waiting, key=lambda rank: -waiting[rank])[:_SLOWEST_SHOWN]
    text = (
        f"epoch {epoch}: {table[:, 4].sum():.0f} samples in {took:.2f} s, {table[:, 4].sum() / took:,.0f} samples/s, "
        f"{table[:, 5].sum() / took / 1e9:.3f} GB/s, {sum(waiting.values()) / len(waiting):.1%} of the time waiting "
        "for data"
    )
    if ranks > 1:
        text += "; waiting longest: " + ", ".join(f"rank {rank} ({waiting[rank]:.1%})" for rank in slowest)
    if len(figures) < ranks:
        text += f" (of {len(figures)} of {ranks} ranks; the others have not ended the epoch)"
    _log.info("%s", text)
