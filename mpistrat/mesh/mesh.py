"""The ranks of a job as a grid with named axes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from mpistrat.collectives import structures
from mpistrat.process import mpi
from mpistrat.runtime.topology import Topology

REPLICA = "replica"  # the axis along which a strategy has replicas


@dataclass(frozen=True, eq=False)
class MeshAxis:
    """An axis of a `Mesh`, as this rank sees it: the ranks that differ from it in this coordinate alone.

    Attributes
    ----------
    name : str
    size : int
        The number of coordinates.
    index : int
        The coordinate of this rank.
    comm : mpi4py.MPI.Intracomm
        The ranks along the axis, in the order of their coordinates. For your own calls.

    Examples
    --------
    >>> import mpistrat
    >>> axis = mpistrat.experimental.Mesh(x=1).axis("x")
    >>> axis.size, axis.index
    (1, 0)
    """

    name: str
    size: int
    index: int
    comm: Any

    def neighbors(self, periodic: bool = True) -> tuple[int | None, int | None]:
        """Return the ranks in ``comm`` before and after this one; None beyond the ends unless the axis is periodic.

        Examples
        --------
        >>> import mpistrat
        >>> mpistrat.experimental.Mesh(x=1).axis("x").neighbors(periodic=False)
        (None, None)
        """
        before, after = self.index - 1, self.index + 1
        if periodic:
            return before % self.size, after % self.size
        return (None if before < 0 else before), (None if after == self.size else after)


class Mesh:
    """The ranks of a job as a grid with named axes. Collective.

    The last axis is the innermost: its ranks follow each other in the order of nodes, so that they share a node where
    the axis fits into it. Give the axis that communicates most last.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        The ranks; by default all ranks of the job.
    **axes : int
        The name and the size of each axis. One of them may be -1: what the others leave of the ranks.

    Attributes
    ----------
    axes : dict
        The size of each axis by its name.
    coordinates : dict
        The place of this rank on each axis.
    size, rank : int
        The number of ranks in ``comm``, and which one this is.
    ranks : numpy.ndarray
        The rank in ``comm`` at each place, of the shape of the mesh.

    Raises
    ------
    TypeError
        If a size is not an int.
    ValueError
        On every rank, if the sizes do not make up the number of ranks, or differ between ranks.

    Examples
    --------
    >>> import mpistrat
    >>> mesh = mpistrat.experimental.Mesh(replica=-1, model=1)
    >>> mesh.axes, mesh.coordinates
    ({'replica': 1, 'model': 1}, {'replica': 0, 'model': 0})
    >>> mesh.comm("model").size
    1
    """

    def __init__(self, *, comm: Any = None, **axes: int):
        self.parent = mpi.start().COMM_WORLD if comm is None else comm
        self.topology = topology = Topology.of(self.parent)
        with structures.refusals("Mesh", topology):
            self.axes = _sizes(axes, topology.world.size)
        structures.agree(topology, "Mesh", tuple(self.axes.items()))
        shape = tuple(self.axes.values())
        self.ranks = np.array([*chain(*topology.nodes)]).reshape(shape)
        self._places = {
            int(rank): dict(zip(self.axes, place, strict=True)) for place, rank in np.ndenumerate(self.ranks)
        }
        self.size, self.rank = topology.world.size, topology.world.rank
        self.coordinates = self._places[self.rank]
        place = tuple(self.coordinates.values())
        self._along: dict[str, MeshAxis] = {}
        for i, (name, size) in enumerate(self.axes.items()):
            others = np.ravel_multi_index((*place[:i], 0, *place[i + 1 :]), shape)
            along = topology.world.Split(int(others), key=place[i])
            self._along[name] = MeshAxis(name, size, place[i], along)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes."""
        return tuple(self.axes.values())

    def axis(self, name: str) -> MeshAxis:
        """Return an axis by its name.

        Raises
        ------
        ValueError
            If the mesh has no such axis.
        """
        if name not in self._along:
            raise ValueError(f"the mesh has no axis {name!r}: it has {', '.join(map(repr, self.axes))}")
        return self._along[name]

    def comm(self, name: str) -> Any:
        """Return the communicator of the ranks along an axis, for your own calls."""
        return self.axis(name).comm

    def topology_along(self, name: str) -> Topology:
        """Return the ranks along an axis, for the collectives of this library. Collective over them at first."""
        return Topology.of(self.axis(name).comm)

    def place_of(self, rank: int) -> dict[str, int]:
        """Return the place of a rank on each axis."""
        return self._places[rank]

    def is_first_beside(self, name: str) -> bool:
        """Return whether this rank is at place 0 of all axes but this one."""
        return not any(place for each, place in self.coordinates.items() if each != name)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.axes.items())
        return f"<Mesh: {sizes}, this rank at {tuple(self.coordinates.values())}>"


def _sizes(axes: dict[str, int], ranks: int) -> dict[str, int]:
    """Return the sizes of axes that make up so many ranks."""
    if not axes:
        raise ValueError("a mesh has at least one axis, such as Mesh(replica=-1, model=2)")
    for name, size in axes.items():
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
            raise TypeError(f"the size of axis {name!r} must be an int, not {size!r}")
        if size < 1 and size != -1:
            raise ValueError(f"the size of axis {name!r} must be at least 1, or -1 for the rest, not {size}")
    sizes = {name: int(size) for name, size in axes.items()}
    rest = [name for name, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    if len(rest) > 1:
        raise ValueError(f"only one axis can have what the others leave, not {rest}")
    if ranks % known or (not rest and known != ranks):
        raise ValueError(
            f"a mesh of {sizes} does not make up the {ranks} ranks: their product must be {ranks}. For a mesh over "
            "some of them, give comm=, such as MPI.COMM_WORLD.Split(color)"
        )
    for name in rest:
        sizes[name] = ranks // known
    return sizes
