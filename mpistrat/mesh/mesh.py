"""The ranks of a job as a grid with named axes, and how an array is cut over them: the box of each rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, count
from types import NoneType
from typing import Any, NamedTuple

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
        meshes, key = topology.slot(_Meshes), tuple(sizes.items())
        structures.agree(topology, "Mesh", key)
        if key not in meshes:
            (mesh := object.__new__(cls))._split(parent, topology, sizes)
            meshes[key] = mesh
        return meshes[key]

    @classmethod
    def for_grid(cls, ndim: int, *, comm: Any = None, names: Sequence[str] = "xyz") -> Mesh:
        """Return a mesh of ``ndim`` axes of sizes that are as equal as possible, the largest first. Collective.

        Blocks that are about cubes have the shortest borders. ``MPI_Dims_create`` chooses the sizes.

        Parameters
        ----------
        ndim : int
        comm : mpi4py.MPI.Intracomm, optional
            The ranks; by default all ranks of the job.
        names : sequence of str
            The names of the axes, at least ``ndim``.

        Raises
        ------
        TypeError
            If ``ndim`` is not an int.
        ValueError
            Unless there are 1 to ``len(names)`` axes.

        Examples
        --------
        >>> import mpistrat
        >>> mpistrat.Mesh.for_grid(2).axes
        {'x': 1, 'y': 1}
        """
        if not isinstance(ndim, (int, np.integer)):
            raise TypeError(f"ndim must be the number of dimensions, not {ndim!r}: Mesh takes the size of each axis")
        if not 1 <= ndim <= len(names):
            raise ValueError(f"ndim must be from 1 to {len(names)}, the number of names, not {ndim!r}")
        MPI = mpi.start()
        sizes = MPI.Compute_dims((MPI.COMM_WORLD if comm is None else comm).size, ndim)
        return cls(comm=comm, **dict(zip(names, sizes, strict=False)))

    def _split(self, parent: Any, topology: Topology, axes: dict[str, int]) -> None:
        self.parent, self.topology, self.axes = parent, topology, axes
        self.halos = topology.slot(_Meshes).halos  # their numbers: all meshes of the ranks send by one communicator
        shape = tuple(axes.values())
        # Node by node, so that the ranks of the innermost axis share a node where it fits into one.
        self.ranks = np.array([*chain(*topology.nodes)]).reshape(shape)
        self._coordinates_of = {
            int(rank): dict(zip(self.axes, position, strict=True)) for position, rank in np.ndenumerate(self.ranks)
        }
        self.size, self.rank = topology.world.size, topology.world.rank
        self.coordinates = self._coordinates_of[self.rank]
        position = tuple(self.coordinates.values())
        self._along: dict[str, MeshAxis] = {}
        for i, (name, size) in enumerate(self.axes.items()):
            others = np.ravel_multi_index((*position[:i], 0, *position[i + 1 :]), shape)
            # Ranks get one color if they differ in this coordinate alone.
            along = topology.world.Split(int(others), key=position[i])
            self._along[name] = MeshAxis(name, size, position[i], along)

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
        line = self.ranks[tuple(slice(None) if other == name else i for other, i in self.coordinates.items())].tolist()
        before, after = (None if i is None else line[i] for i in self.axis(name).neighbors(periodic))
        return before, after

    def require_ranks(self, topology: Topology, caller: str) -> None:
        """Raise ValueError unless the ranks of the mesh are these, in any order. Never communicates."""
        MPI = mpi.start()
        if MPI.Comm.Compare(self.topology.world, topology.world) == MPI.UNEQUAL:
            raise ValueError(
                f"{caller}: the mesh of an array has {self.size} ranks, and {topology.world.size} other ones make this "
                "call; fix: make it with a strategy of its ranks, MultiWorkerMirroredStrategy(comm=mesh.parent)"
            )

    def place_of(self, rank: int) -> dict[str, int]:
        """Return the place of a rank on each axis."""
        return self._coordinates_of[rank]

    def is_first_beside(self, name: str) -> bool:
        """Return whether this rank is at place 0 of all axes but this one."""
        return not any(position for other, position in self.coordinates.items() if other != name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        return self  # there is one for each communicator and set of axes

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.axes.items())
        return f"<Mesh: {sizes}, this rank at {tuple(self.coordinates.values())}>"


class _Meshes(Slot, dict[tuple[tuple[str, int], ...], Mesh]):
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


# --- how an array is cut --------------------------------------------------------


Box = tuple[slice, ...]  # the part of a global array
Axes = Sequence[str | None]  # the axis of a mesh for each dimension
Parts = Mapping[str, Sequence[int]] | None  # the lengths of parts along axes


class Layout(NamedTuple):
    """The shape of a global array, the axis of the mesh that cuts each dimension or None, and where it cuts.

    ``cuts`` has the first row of each part and the end, for each dimension.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    cuts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, mesh: Mesh, shape: Sequence[int], axes: Axes, parts: Parts = None) -> Layout:
        """Return the layout with parts that are as even as possible, but where ``parts`` has their lengths by axis.

        Raise ValueError if an axis is unknown or cuts two dimensions, or lengths do not make up a dimension.
        """
        shape, axes = tuple(map(int, shape)), tuple(axes)
        if not isinstance(parts, (Mapping, NoneType)):
            raise TypeError(f"parts must be lengths by axis, such as {{'x': [70, 30]}}, not {parts!r}")
        if len(axes) != len(shape):
            raise ValueError(f"axes {axes} must have an axis or None for each dimension of the shape {shape}")
        parts = dict(parts or {})
        named = [name for name in axes if name is not None]
        if len({*named}) < len(named):
            raise ValueError(f"an axis of a mesh cuts one dimension of an array, and {axes} names one twice")
        cuts: list[tuple[int, ...]] = []
        for size, name in zip(shape, axes, strict=True):
            if name is None:
                cuts.append((0, size))
                continue
            count = mesh.axis(name).size
            even = [size // count + (i < size % count) for i in range(count)]
            lengths = [int(length) for length in parts.pop(name, even)]
            if len(lengths) != count or sum(lengths) != size or min(lengths) < 0:
                raise ValueError(
                    f"parts of {lengths} along {name!r} must be {count} lengths that make up the {size} rows"
                )
            cuts.append((0, *accumulate(lengths)))
        if parts:
            raise ValueError(f"parts has lengths for {[*parts]}, which cut no dimension")
        return cls(shape, axes, tuple(cuts))

    def box(self, mesh: Mesh, rank: int | None = None) -> Box:
        """Return the part of a rank; by default of this one."""
        coordinates = mesh.coordinates if rank is None else mesh.place_of(rank)
        starts = ((0 if name is None else coordinates[name]) for name in self.axes)
        return tuple(slice(cuts[i], cuts[i + 1]) for i, cuts in zip(starts, self.cuts, strict=True))

    def is_first(self, mesh: Mesh, rank: int) -> bool:
        """Return whether a rank is the first rank that has its part."""
        return not any(index for name, index in mesh.place_of(rank).items() if name not in self.axes)

    def dropped(self, dimensions: Sequence[int], keepdims: bool) -> Layout:
        """Return the layout without some dimensions, or with a length of 1 there."""
        one: tuple[Any, ...] = (1, None, (0, 1))
        every = enumerate(zip(*self, strict=True))
        remaining = [one if i in dimensions else dimension for i, dimension in every if keepdims or i not in dimensions]
        return Layout(*zip(*remaining, strict=True)) if remaining else Layout.uncut(())

    def sliced(self, bounds: Sequence[tuple[int, int]]) -> Layout:
        """Return the layout of the elements from the first to the second bound of each dimension."""
        shape = tuple(stop - start for start, stop in bounds)
        ends = zip(self.cuts, bounds, strict=True)
        cuts = tuple(tuple(min(max(cut, start), stop) - start for cut in edges) for edges, (start, stop) in ends)
        return Layout(shape, self.axes, cuts)

    @classmethod
    def uncut(cls, shape: tuple[int, ...]) -> Layout:
        """Return the layout of an array that every rank has whole."""
        return cls(shape, (None,) * len(shape), tuple((0, n) for n in shape))

    def key(self, box: Box) -> Box:
        """Return the slices of a part that lie in a box of `joined`: less of dimensions that this rank has whole."""
        keys = zip(self.axes, self.shape, box[len(box) - len(self.shape) :], strict=True)
        return tuple(part if name is None and size != 1 else slice(None) for name, size, part in keys)


def common(box: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    shared = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(box, other, strict=True))
    return shared if all(side.start < side.stop for side in shared) else None


def inside(box: Box, outer: Box) -> Box:
    """Return a box in the coordinates of the box around it."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, outer, strict=True))


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(side.stop - side.start for side in box)


def joined(layouts: Sequence[Layout]) -> Layout | None:
    """Return the layout of the result of NumPy for arrays of these layouts, or None if they are cut differently.

    Raise ValueError if the shapes do not fit by NumPy's rules of broadcasting.
    """
    if all(layout == layouts[0] for layout in layouts):
        return layouts[0]
    shape, axes, cuts = [], [], []
    for i in range(-max(len(layout.shape) for layout in layouts), 0):  # from the last dimension, as NumPy
        having = [layout for layout in layouts if i >= -len(layout.shape)]
        sizes = {layout.shape[i] for layout in having} - {1} or {1}
        n = sizes.pop()
        if sizes:
            raise ValueError(
                f"the shapes {', '.join(str(layout.shape) for layout in layouts)} do not fit together: a plain array "
                "has the shape of the whole. What this rank has computed for its part goes to `.local`"
            )
        ways = {(layout.axes[i], layout.cuts[i]) for layout in having if layout.axes[i] is not None}
        name, cut = ways.pop() if ways else (None, (0, n))
        if ways or cut[-1] != n or (name is not None and name in axes):
            return None
        shape.append(n)
        axes.append(name)
        cuts.append(cut)
    return Layout(tuple(shape), tuple(axes), tuple(cuts))
