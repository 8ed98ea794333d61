"""Fixtures that play several replicas in one process: threads with a stand-in for collective calls."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from mpistrat import nest
from mpistrat.runtime.object_collectives import ObjectCollectives

LIMIT = 100  # seconds that the replicas wait for each other


class Peer(ObjectCollectives):
    """One replica of a group of threads, as ``Topology`` is one of a communicator."""

    def __init__(self, rank, size, shared):
        self.rank, self.size, self._shared = rank, size, shared
        self.nodes = (tuple(range(size)),)
        self.gathers = 0

    def all_gather_object(self, obj, timeout_seconds=None):
        self.gathers += 1
        self._shared.values[self.rank] = obj
        self._shared.barrier.wait(LIMIT)
        values = list(self._shared.values)
        self._shared.barrier.wait(LIMIT)
        return values

    def broadcast_object(self, obj, root=0):
        return self.all_gather_object(obj)[root]

    def on_first(self, fn):
        return self.on_all_ranks(fn if self.rank == 0 else lambda: None)[0]

    def all_true(self, flag):
        return all(self.all_gather_object(bool(flag)))


def run(size, fn):
    """Call ``fn(peer)`` on every replica; return results, or the errors that were raised, in rank order."""
    shared = SimpleNamespace(barrier=threading.Barrier(size), values=[None] * size)
    results = [None] * size

    def replica(rank):
        try:
            results[rank] = fn(Peer(rank, size, shared))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=replica, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT)
        assert not thread.is_alive()
    return results


@pytest.fixture(scope="session")
def replicas():
    """Call ``replicas(size, fn)`` for the results of ``fn(peer)`` of all replicas."""

    def call(size, fn):
        results = run(size, fn)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    return call


@pytest.fixture(scope="session")
def replica_errors():
    """As ``replicas``, but errors are results."""
    return run


@pytest.fixture(scope="session")
def plain():
    """Return structures of arrays as structures of lists, to compare with ``==``."""

    def call(tree):
        return nest.map_structure(lambda x: np.asarray(x).tolist(), tree)

    return call
