"""How an array is cut over the axes of a mesh: the box of each rank, without communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import NoneType
from typing import Any, NamedTuple

from mpistrat.mesh.mesh import Mesh

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
            lengths = [int(each) for each in parts.pop(name, even)]
            if len(lengths) != count or sum(lengths) != size or min(lengths) < 0:
                raise ValueError(
                    f"parts of {lengths} along {name!r} must be {count} lengths that make up the {size} rows"
                )
            cuts.append((0, *accumulate(lengths)))
        if parts:
            raise ValueError(f"parts has lengths for {[*parts]}, which cut no dimension")
        return cls(shape, axes, tuple(cuts))

    def box(self, mesh: Mesh, rank: int | None = None) -> Box:
        """Return the part of a rank; by default that of this one."""
        place = mesh.coordinates if rank is None else mesh.place_of(rank)
        starts = ((0 if name is None else place[name]) for name in self.axes)
        return tuple(slice(cuts[i], cuts[i + 1]) for i, cuts in zip(starts, self.cuts, strict=True))

    def is_first(self, mesh: Mesh, rank: int) -> bool:
        """Return whether a rank is the first of those that have its part."""
        return not any(index for name, index in mesh.place_of(rank).items() if name not in self.axes)

    def dropped(self, dimensions: Sequence[int], keepdims: bool) -> Layout:
        """Return the layout without some dimensions, or with a length of 1 there."""
        one: tuple[Any, ...] = (1, None, (0, 1))
        every = enumerate(zip(*self, strict=True))
        kept = [one if i in dimensions else each for i, each in every if keepdims or i not in dimensions]
        return Layout(*zip(*kept, strict=True)) if kept else Layout.uncut(())

    @classmethod
    def uncut(cls, shape: tuple[int, ...]) -> Layout:
        """Return the layout of an array that every rank has whole."""
        return cls(shape, (None,) * len(shape), tuple((0, n) for n in shape))

    def key(self, box: Box) -> Box:
        """Return what of a part meets a box of the result of `joined`: less, of dimensions that this rank has whole."""
        keys = zip(self.axes, self.shape, box[len(box) - len(self.shape) :], strict=True)
        return tuple(part if name is None and size != 1 else slice(None) for name, size, part in keys)


def common(ours: Box, theirs: Box) -> Box | None:
    """Return what two boxes share, or None."""
    shared = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(ours, theirs, strict=True))
    return shared if all(each.start < each.stop for each in shared) else None


def inside(box: Box, outer: Box) -> Box:
    """Return a box in the coordinates of the box around it."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, outer, strict=True))


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(each.stop - each.start for each in box)


def joined(layouts: Sequence[Layout]) -> Layout | None:
    """Return the layout of what NumPy makes of arrays of these, or None if they are cut differently.

    Raise ValueError if the shapes do not fit by NumPy's rules of broadcasting.
    """
    if all(each == layouts[0] for each in layouts):
        return layouts[0]
    shape, axes, cuts = [], [], []
    for i in range(-max(len(each.shape) for each in layouts), 0):  # from the last dimension, as NumPy
        having = [each for each in layouts if i >= -len(each.shape)]
        sizes = {each.shape[i] for each in having} - {1} or {1}
        n = sizes.pop()
        if sizes:
            raise ValueError(f"the shapes {', '.join(str(each.shape) for each in layouts)} do not fit together")
        found = {(each.axes[i], each.cuts[i]) for each in having if each.axes[i] is not None} or {(None, (0, n))}
        name, cut = found.pop()
        if found or cut[-1] != n or (name is not None and name in axes):
            return None
        shape.append(n)
        axes.append(name)
        cuts.append(cut)
    return Layout(tuple(shape), tuple(axes), tuple(cuts))
