"""The ranks of a job as a grid with named axes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import numpy as np

from mpistrat.collectives import structures
from mpistrat.process import mpi
from mpistrat.runtime.topology import Slot, Topology

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
    >>> axis = mpistrat.Mesh(x=1).axis("x")
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
        >>> mpistrat.Mesh(x=1).axis("x").neighbors(periodic=False)
        (None, None)
        """
        before, after = self.index - 1, self.index + 1
        if periodic:
            return before % self.size, after % self.size
        return (None if before < 0 else before), (None if after == self.size else after)


class Mesh:
    """The ranks of a job as a grid with named axes. Collective. Equal meshes of one communicator are one object.

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
    >>> mesh = mpistrat.Mesh(replica=-1, model=1)
    >>> mesh.axes, mesh.coordinates
    ({'replica': 1, 'model': 1}, {'replica': 0, 'model': 0})
    >>> mesh.comm("model").size
    1
    """

    def __new__(cls, *, comm: Any = None, **axes: int) -> Mesh:
        parent = mpi.start().COMM_WORLD if comm is None else comm
        topology = Topology.of(parent)
        with structures.refusals("Mesh", topology):
            sizes = _sizes(axes, topology.world.size)
        made, key = topology.slot(_Made), tuple(sizes.items())
        structures.agree(topology, "Mesh", key)
        if key not in made:
            (mesh := object.__new__(cls))._split(parent, topology, sizes)
            made[key] = mesh
        return made[key]

    def _split(self, parent: Any, topology: Topology, axes: dict[str, int]) -> None:
        self.parent, self.topology, self.axes = parent, topology, axes
        self.halos = topology.slot(_Made).halos  # their numbers: all meshes of the ranks send by one communicator
        shape = tuple(axes.values())
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

    def neighbors(self, name: str, periodic: bool) -> tuple[int | None, int | None]:
        """Return the ranks before and after this one along an axis, as `MeshAxis.neighbors`, but of the mesh."""
        line = self.ranks[tuple(slice(None) if each == name else i for each, i in self.coordinates.items())].tolist()
        before, after = (None if i is None else line[i] for i in self.axis(name).neighbors(periodic))
        return before, after

    def require_ranks(self, topology: Topology, what: str) -> None:
        """Raise ValueError unless the ranks of the mesh are these, in any order. Never communicates."""
        MPI = mpi.start()
        if MPI.Comm.Compare(self.topology.world, topology.world) == MPI.UNEQUAL:
            raise ValueError(
                f"{what}: the mesh of an array has {self.size} ranks, and {topology.world.size} other ones make this "
                "call; fix: make it with a strategy of its ranks, MultiWorkerMirroredStrategy(comm=mesh.parent)"
            )

    def place_of(self, rank: int) -> dict[str, int]:
        """Return the place of a rank on each axis."""
        return self._places[rank]

    def is_first_beside(self, name: str) -> bool:
        """Return whether this rank is at place 0 of all axes but this one."""
        return not any(place for each, place in self.coordinates.items() if each != name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        return self  # there is one for each communicator and set of axes

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.axes.items())
        return f"<Mesh: {sizes}, this rank at {tuple(self.coordinates.values())}>"


class _Made(Slot, dict[tuple[tuple[str, int], ...], Mesh]):
    """The meshes of a communicator by their axes: each set of axes is made once, and freed with the communicator."""

    def __init__(self) -> None:
        super().__init__()
        self.halos = count()

    def close(self) -> None:
        for mesh in self.values():
            for name in mesh.axes:
                mesh.comm(name).Free()


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
