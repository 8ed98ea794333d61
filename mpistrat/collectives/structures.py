"""What the ranks compare of a nested structure before any of its leaves is sent.

`mpistrat.nest.take_apart` gives the form of a structure: keys, lengths and places of None. A collective that is one
operation has the form among the parts of this. One that is several operations calls `agree` first, and what
may fail on one rank alone, before it sends anything, stands in `refusals`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from mpistrat.runtime import arrays
from mpistrat.runtime.agreement.operation import Remark, operation
from mpistrat.runtime.topology import Topology
from mpistrat.values import IndexedSlices, Mirrored, component

HOST, GPU, ROWS, MIRRORED = "an array", "an array on a GPU", "sparse rows", "a mirrored value"


def agree(topology: Topology, name: str, *parts: Hashable, timeout_seconds: float | None = None) -> None:
    """Compare what the ranks are about to do. Collective; returns at once on a single rank.

    Parameters
    ----------
    topology : Topology
    name : str
        The collective.
    *parts
        The form of the structure, the kinds of its leaves, and other values that must be equal on all ranks.
    timeout_seconds : float, optional
        As in `Topology.compare`.

    Raises
    ------
    MismatchError
        On every rank, if they differ.
    """
    if topology.size > 1:
        topology.compare(operation(name, *parts), timeout_seconds)


class refusals:
    """Context of what prepares a collective: tells the other ranks of an error in the arguments of this one.

    Nothing in it communicates. The error itself is raised if all ranks have one of its class.

    Parameters
    ----------
    name : str
        The collective.
    topology : Topology
    timeout_seconds : float, optional
        As in `Topology.compare`.

    Raises
    ------
    MismatchError
        On every rank, if the others do not refuse.
    """

    __slots__ = ("_name", "_timeout_seconds", "_topology")

    def __init__(self, name: str, topology: Topology, timeout_seconds: float | None = None):
        self._name = name
        self._topology = topology
        self._timeout_seconds = timeout_seconds

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None and issubclass(kind, (TypeError, ValueError, NotImplementedError)):
            parts = "refused:", kind.__name__, Remark(str(error))
            agree(self._topology, self._name, *parts, timeout_seconds=self._timeout_seconds)


def kind(leaf: Any) -> str:
    """The kind of a leaf, which decides how it is sent: one of `HOST`, `GPU`, `ROWS`."""
    if isinstance(leaf, IndexedSlices):
        return ROWS
    return GPU if arrays.on_gpu(leaf) else HOST


def kind_across_replicas(value: Any) -> str:
    """As `kind`; `MIRRORED` for a value that is equal on all replicas, which is not sent at all."""
    if isinstance(value, Mirrored):
        return MIRRORED
    return kind(component(value))
