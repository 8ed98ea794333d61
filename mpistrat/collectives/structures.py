"""The comparison of nested structures between ranks, before any leaf is sent.

`mpistrat.nest.take_apart` gives the form of a structure: keys, lengths and places of None. A collective of one
operation has the form among the parts of the operation. A collective of several operations calls `agree` first.
Preparations that may fail on one rank alone run inside `refusals`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from mpistrat.arrays import arrays
from mpistrat.runtime.agreement.operation import UncomparedText, operation
from mpistrat.runtime.topology import Topology
from mpistrat.values import DistributedValues, IndexedSlices, Mirrored

HOST, GPU, ROWS, MIRRORED = "an array", "an array on a GPU", "sparse rows", "a mirrored value"


def agree(topology: Topology, name: str, *parts: Hashable, timeout_seconds: float | None = None) -> None:
    """Compare the next collective, its name and parts, over all ranks. Returns at once on a single rank.

    Raise MismatchError on every rank if they differ.
    """
    if topology.size > 1:
        topology.lock.compare(operation(name, *parts), timeout_seconds)


class refusals:
    """A context that tells the other ranks of an error in this rank's arguments of the collective ``name``.

    The code inside must not communicate. The error is raised if all ranks raise one of its class, else MismatchError.
    """

    __slots__ = ("_name", "_timeout_seconds", "_topology")

    def __init__(self, name: str, topology: Topology, timeout_seconds: float | None = None):
        self._name = name
        self._topology = topology
        self._timeout_seconds = timeout_seconds

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (TypeError, ValueError, NotImplementedError)):
            refuse(self._name, self._topology, error, self._timeout_seconds)


def refuse(name: str, topology: Topology, error: Exception, timeout_seconds: float | None = None) -> None:
    """Tell the other ranks of an error in this rank's arguments of a collective, as `refusals`."""
    parts = "refused:", type(error).__name__, UncomparedText(str(error))
    agree(topology, name, *parts, timeout_seconds=timeout_seconds)


def kind(leaf: Any) -> str:
    """Return the kind of a leaf, which decides how it is sent: `HOST`, `GPU` or `ROWS`."""
    if isinstance(leaf, IndexedSlices):
        return ROWS
    return GPU if arrays.on_gpu(leaf) else HOST


def kind_across_replicas(value: Any) -> str:
    """Return the kind of a value as `kind` does, or `MIRRORED` if it is equal on all replicas and not sent."""
    if isinstance(value, Mirrored):
        return MIRRORED
    return kind(value.values[0] if isinstance(value, DistributedValues) else value)
