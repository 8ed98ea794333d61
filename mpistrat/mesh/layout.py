"""How an array is cut over the axes of a mesh: the box of each rank, without communication."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays.arrays import as_numpy
from mpistrat.mesh.mesh import Mesh

Box = tuple[slice, ...]  # the part of a global array


class Layout(NamedTuple):
    """The shape of a global array, the axis of the mesh that cuts each dimension or None, and where it cuts.

    ``cuts`` has the first row of each part and the end, for each dimension.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    cuts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        shape: Sequence[int],
        axes: Sequence[str | None],
        parts: Mapping[str, Sequence[int]] | None = None,
    ) -> Layout:
        """Return the layout with parts that are as even as possible, but where ``parts`` has their lengths by axis.

        Raise ValueError if an axis is unknown or cuts two dimensions, or lengths do not make up a dimension.
        """
        shape, axes, parts = tuple(map(int, shape)), tuple(axes), dict(parts or {})
        if len(axes) != len(shape):
            raise ValueError(f"axes {axes} must have an axis or None for each dimension of the shape {shape}")
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
        kept = [i for i in range(len(self.shape)) if keepdims or i not in dimensions]
        return Layout(
            tuple(1 if i in dimensions else self.shape[i] for i in kept),
            tuple(None if i in dimensions else self.axes[i] for i in kept),
            tuple((0, 1) if i in dimensions else self.cuts[i] for i in kept),
        )

    @property
    def elements(self) -> int:
        """The number of elements of the whole array."""
        return math.prod(self.shape)

    def fits(self, other: Layout) -> bool:
        """Return whether parts of both lie at the same places, but where a dimension of this one has a length of 1."""
        mine, theirs = ([*zip(*each, strict=True)][::-1] for each in (self, other))  # from the last dimension on
        return len(mine) <= len(theirs) and all(a in (b, (1, None, (0, 1))) for a, b in zip(mine, theirs, strict=False))

    def lengths(self, dimension: int) -> list[int]:
        """Return the lengths of the parts along a dimension."""
        return [end - start for start, end in pairwise(self.cuts[dimension])]


def common(ours: Box, theirs: Box) -> Box | None:
    """Return what two boxes share, or None.

    >>> common((slice(0, 4),), (slice(2, 9),))
    (slice(2, 4, None),)
    """
    shared = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(ours, theirs, strict=True))
    return shared if all(each.start < each.stop for each in shared) else None


def inside(box: Box, outer: Box) -> Box:
    """Return a box in the coordinates of the box around it."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, outer, strict=True))


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(each.stop - each.start for each in box)


def cut_like(value: Any, layout: Layout, box: Box) -> np.ndarray:
    """Return the part of a plain array that meets a box of an array of this layout by NumPy's rules of broadcasting.

    Raise ValueError if the shapes do not fit.
    """
    value = as_numpy(value)
    if value.ndim > len(layout.shape) or any(
        size not in (1, whole) for size, whole in zip(value.shape[::-1], layout.shape[::-1], strict=False)
    ):
        raise ValueError(f"an array of shape {value.shape} does not fit to a cut array of shape {layout.shape}")
    own = box[len(box) - value.ndim :]
    return value[tuple(slice(None) if size == 1 else part for size, part in zip(value.shape, own, strict=True))]
