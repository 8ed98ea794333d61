"""An array that is cut over the ranks of a mesh: domain decomposition, and layers over several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from mpistrat.arrays.arrays import as_bytes, as_numpy
from mpistrat.collectives import CollectiveAllReduce, CommunicationOptions, structures
from mpistrat.collectives.arithmetic.operations import FurtherOp, Op
from mpistrat.collectives.movement.exchange import exchange
from mpistrat.collectives.movement.gather import all_gather
from mpistrat.mesh.halo import Halo
from mpistrat.mesh.layout import Box, Layout, common, cut_like, inside, shape_of
from mpistrat.mesh.mesh import Mesh
from mpistrat.runtime.agreement.operation import operation
from mpistrat.values import ArrayLike, ReduceOp

_NUMBERS = (bool, int, float, complex)
_REMEDY = "use gather() for the whole array, or local for the part of this rank"


class ShardedArray(NDArrayOperatorsMixin):
    """An array of which each rank of a mesh has a part. Make one by `from_array`, `from_local` or `from_callback`.

    Element-wise NumPy functions and operators work on the parts, without communication. Reductions, ``@``, `gather`,
    `redistribute` and `halo` communicate: all ranks of the mesh make these calls in the same order.

    Attributes
    ----------
    local : numpy.ndarray
        The part of this rank.
    mesh : Mesh
    axes : tuple of str or None
        The axis of the mesh that cuts each dimension.
    shape : tuple of int
        That of the whole array.
    offset : tuple of int
        Where the part of this rank begins.

    Examples
    --------
    >>> import mpistrat
    >>> import numpy as np
    >>> mesh = mpistrat.experimental.Mesh(x=-1)
    >>> u = mpistrat.experimental.ShardedArray.from_array(np.arange(6.0), mesh=mesh, axes=("x",))
    >>> float((np.sqrt(u) ** 2 + u).sum()), float(u.max())
    (30.0, 5.0)
    >>> u.gather()
    array([0., 1., 2., 3., 4., 5.])
    """

    def __init__(self, local: np.ndarray, mesh: Mesh, layout: Layout):
        self.local, self.mesh, self.layout = local, mesh, layout

    # --- making ----------------------------------------------------------------------

    @classmethod
    def from_array(
        cls, array: Any, *, mesh: Mesh, axes: Sequence[str | None], parts: Mapping[str, Sequence[int]] | None = None
    ) -> ShardedArray:
        """Cut an array that every rank has. Collective: the ranks compare shapes and cuts.

        Parameters
        ----------
        array : array
            Equal on all ranks. The parts are copies.
        mesh : Mesh
        axes : sequence of str or None
            The axis of the mesh that cuts each dimension; None leaves it whole.
        parts : mapping, optional
            The lengths of the parts along an axis, by its name. By default they are as even as possible.

        Raises
        ------
        ValueError
            If an axis is unknown or cuts two dimensions, or lengths do not make up a dimension. On every rank, if
            shapes or cuts differ between ranks.

        Examples
        --------
        >>> import mpistrat
        >>> import numpy as np
        >>> mesh = mpistrat.experimental.Mesh(x=1)
        >>> made = mpistrat.experimental.ShardedArray.from_array(np.eye(2), mesh=mesh, axes=("x", None))
        >>> made.local.tolist()
        [[1.0, 0.0], [0.0, 1.0]]
        """
        with structures.refusals("ShardedArray", mesh.topology):
            whole = as_numpy(array)
        return cls.from_callback(
            whole.shape, lambda box: np.array(whole[box], order="C"), mesh=mesh, axes=axes, parts=parts
        )

    @classmethod
    def from_callback(
        cls,
        shape: Sequence[int],
        function: Callable[[Box], Any],
        *,
        mesh: Mesh,
        axes: Sequence[str | None],
        parts: Mapping[str, Sequence[int]] | None = None,
    ) -> ShardedArray:
        """Make an array of which a function returns each part, given its slices. Collective, as `from_array`.

        It reads a file such that each rank reads its own part: ``lambda box: file["u"][box]`` with h5py or Zarr.

        Raises
        ------
        ValueError
            As `from_array`. On every rank, if a part has another shape than its box.

        Examples
        --------
        >>> import mpistrat
        >>> import numpy as np
        >>> mesh = mpistrat.experimental.Mesh(x=1)
        >>> file = {"u": np.ones((2, 2))}
        >>> mpistrat.experimental.ShardedArray.from_callback(
        ...     (2, 2), lambda box: file["u"][box], mesh=mesh, axes=(None, "x")
        ... )
        <ShardedArray: (2, 2) float64, cut by (None, 'x'), here (2, 2)>
        """
        with structures.refusals("ShardedArray", mesh.topology):
            layout = Layout.of(mesh, shape, axes, parts)
            box = layout.box(mesh)
            local = np.asarray(as_numpy(function(box)), order="C")
            if local.shape != shape_of(box):
                raise ValueError(
                    f"the part of {box} has the shape {shape_of(box)}, and the function gave {local.shape}"
                )
        structures.agree(mesh.topology, "ShardedArray", *layout, local.dtype)
        return cls(local, mesh, layout)

    @classmethod
    def from_local(cls, local: Any, *, mesh: Mesh, axes: Sequence[str | None]) -> ShardedArray:
        """Make an array of the parts that the ranks have. Collective. The array keeps the memory of ``local``.

        Raises
        ------
        ValueError
            On every rank, if the parts do not lie side by side: the message names ranks and shapes.

        Examples
        --------
        >>> import mpistrat
        >>> import numpy as np
        >>> mesh = mpistrat.experimental.Mesh(x=1)
        >>> mpistrat.experimental.ShardedArray.from_local(np.ones(3), mesh=mesh, axes=["x"]).shape
        (3,)
        """
        topology, axes = mesh.topology, tuple(axes)
        with structures.refusals("ShardedArray", topology):
            local = as_numpy(local)
            if len(axes) != local.ndim:
                raise ValueError(f"axes {axes} must have an axis or None for each dimension of the shape {local.shape}")
        structures.agree(topology, "ShardedArray", axes, local.dtype)
        shapes = topology.all_gather_object(local.shape)
        shape, parts = [], {}
        for dimension, name in enumerate(axes):
            by_place: dict[int, tuple[int, int]] = {}  # its length, and a rank that has it
            for rank, each in enumerate(shapes):
                place = 0 if name is None else mesh.place_of(rank)[mesh.axis(name).name]
                length, first = by_place.setdefault(place, (each[dimension], rank))
                if length != each[dimension]:
                    raise ValueError(
                        f"the parts do not lie side by side in dimension {dimension}: rank {first} has the shape "
                        f"{shapes[first]}, and rank {rank} at the same place of {name!r} has {each}"
                    )
            lengths = [by_place[place][0] for place in sorted(by_place)]
            shape.append(sum(lengths))
            if name is not None:
                parts[name] = lengths
        return cls(local, mesh, Layout.of(mesh, shape, axes, parts))

    # --- facts -----------------------------------------------------------------------

    @property
    def axes(self) -> tuple[str | None, ...]:
        """The axis of the mesh that cuts each dimension."""
        return self.layout.axes

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return self.layout.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the elements."""
        return self.local.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.layout.shape)

    @property
    def box(self) -> Box:
        """The slices of the whole array that this rank has."""
        return self.layout.box(self.mesh)

    @property
    def offset(self) -> tuple[int, ...]:
        """Where the part of this rank begins."""
        return tuple(each.start for each in self.box)

    def __repr__(self) -> str:
        return f"<ShardedArray: {self.shape} {self.dtype}, cut by {self.axes}, here {self.local.shape}>"

    def __len__(self) -> int:
        return self.shape[0]

    def __bool__(self) -> bool:
        _refuse("bool()")

    def __getattr__(self, name: str) -> NoReturn:
        remedy = f": {_REMEDY}" if hasattr(np.ndarray, name) else ""
        raise AttributeError(f"a ShardedArray has no attribute {name!r}{remedy}")

    # --- elements --------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, ArrayLike) for each in inputs):
            return NotImplemented  # NumPy asks the variable, which reads its value
        if method == "__call__" and ufunc is np.matmul and not kwargs:
            return matmul(*inputs)
        if method != "__call__" or ufunc.signature is not None or "where" in kwargs:
            _refuse(f"numpy.{ufunc.__name__}" + ("" if method == "__call__" else f".{method}"))
        outs = kwargs.pop("out", ())
        cut = [each for each in (*inputs, *outs) if isinstance(each, ShardedArray)]
        main = max(cut, key=lambda each: (each.ndim, each.layout.elements))  # the others may have dimensions of 1
        for each in cut:
            if each.mesh is not main.mesh or not each.layout.fits(main.layout):
                raise ValueError(f"{each!r} and {main!r} are cut differently: redistribute one of them")
        # Numbers stay numbers: NumPy lets them take the dtype of the array.
        plain = [
            each.local
            if isinstance(each, ShardedArray)
            else each
            if isinstance(each, _NUMBERS)
            else cut_like(each, main.layout, main.box)
            for each in inputs
        ]
        if outs:
            if any(not isinstance(each, ShardedArray) or each.layout != main.layout for each in outs):
                raise TypeError("out must be a ShardedArray that is cut as the result is")
            kwargs["out"] = tuple(each.local for each in outs)
        result = ufunc(*plain, **kwargs)
        if outs:
            return outs[0] if len(outs) == 1 else outs
        made = [main._like(each) for each in (result if isinstance(result, tuple) else (result,))]
        return tuple(made) if isinstance(result, tuple) else made[0]

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        _refuse(f"numpy.{function.__name__}")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("numpy.asarray")

    def __getitem__(self, key: Any) -> NoReturn:
        _refuse("an index")

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        _refuse("an index")

    def astype(self, dtype: Any) -> ShardedArray:
        """Return the array with another dtype. Never communicates."""
        return self._like(self.local.astype(dtype))

    def copy(self) -> ShardedArray:
        """Return a copy with memory of its own. Never communicates."""
        return self._like(self.local.copy())

    def _like(self, local: np.ndarray) -> ShardedArray:
        return ShardedArray(local, self.mesh, self.layout)

    # --- reductions ------------------------------------------------------------------

    def sum(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Any:
        """Return the sum over dimensions: a cut array, or a number where none is left. Collective.

        As NumPy, but that floating point numbers are added in another order.
        """
        return self._reduced(ReduceOp.SUM, np.add, axis, keepdims)

    def prod(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Any:
        """Return the product, as `sum`. Collective."""
        return self._reduced(FurtherOp.PROD, np.multiply, axis, keepdims)

    def min(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Any:
        """Return the minimum, as `sum`. Collective."""
        return self._reduced(FurtherOp.MIN, np.minimum, axis, keepdims)

    def max(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Any:
        """Return the maximum, as `sum`. Collective."""
        return self._reduced(FurtherOp.MAX, np.maximum, axis, keepdims)

    def mean(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Any:
        """Return the mean, as `sum`. Collective. Of integers in float64."""
        exact = {"f": np.float32 if self.dtype.itemsize < 4 else self.dtype, "c": self.dtype}  # halves as NumPy
        wide = self.astype(exact.get(self.dtype.kind, np.float64))
        count = int(np.prod([self.shape[i] for i in self._dimensions(axis)]))
        mean = wide.sum(axis, keepdims) / wide.dtype.type(count)
        return mean.astype(self.dtype) if self.dtype.kind == "f" else mean

    def _dimensions(self, axis: int | Sequence[int] | None) -> tuple[int, ...]:
        given = range(self.ndim) if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
        if any(not -self.ndim <= each < self.ndim for each in given):
            raise ValueError(f"axis {axis} is out of range for the shape {self.shape}")
        return tuple(each % self.ndim for each in given)

    def _reduced(self, op: Op, ufunc: np.ufunc, axis: Any, keepdims: bool) -> Any:
        dimensions = self._dimensions(axis)
        if self.dtype.kind in "mM":  # else only the ranks with empty parts would raise
            _refuse(f"{ufunc.__name__} of {self.dtype}")
        if ufunc.identity is None and not all(self.shape[i] for i in dimensions):
            raise ValueError(f"an array of shape {self.shape} has no {op.name} over axis {axis}")
        sums = np.sum if ufunc is np.add else np.prod  # these widen small integers
        if ufunc.identity is not None:
            part = sums(self.local, dimensions, keepdims=keepdims)
        elif self.local.size:
            part = ufunc.reduce(self.local, dimensions, keepdims=keepdims)
        else:  # the parts of other ranks decide
            part = ufunc.reduce(self.local, dimensions, keepdims=keepdims, initial=_worst(self.dtype, op))
        part = np.asarray(part)
        for i in dimensions:
            name = self.axes[i]
            if name is not None:
                part = _all_reduce(self.mesh, name, op, part)
        layout = self.layout.dropped(dimensions, keepdims)
        return ShardedArray(part, self.mesh, layout) if layout.shape else part[()]

    # --- movement --------------------------------------------------------------------

    def gather(self) -> np.ndarray:
        """Return the whole array, on every rank. Collective."""
        mesh, layout = self.mesh, self.layout
        mine = self.local.reshape(-1) if layout.is_first(mesh, mesh.rank) else self.local.reshape(-1)[:0]
        flat = all_gather(mesh.topology, np.ascontiguousarray(mine), 0)
        whole, start = np.empty(self.shape, self.dtype), 0
        for rank in range(mesh.size):
            if layout.is_first(mesh, rank):
                box = layout.box(mesh, rank)
                part = whole[box]
                part[...] = flat[start : start + part.size].reshape(part.shape)
                start += part.size
        return whole

    def redistribute(
        self, axes: Sequence[str | None], parts: Mapping[str, Sequence[int]] | None = None
    ) -> ShardedArray:
        """Return the array cut in another way. Collective. A rank sends only what another one does not have.

        Raises
        ------
        ValueError
            As `from_array`.
        """
        mesh, topology = self.mesh, self.mesh.topology
        with structures.refusals("ShardedArray.redistribute", topology):
            new = Layout.of(mesh, self.shape, axes, parts)
        mine, wanted = self.box, new.box(mesh)
        out = np.empty(shape_of(wanted), self.dtype)
        ranks = range(mesh.size)
        given = [self._moves(mesh.rank, rank, common(mine, new.box(mesh, rank))) for rank in ranks]
        taken = [self._moves(rank, mesh.rank, common(self.layout.box(mesh, rank), wanted)) for rank in ranks]
        sends = [None if box is None else np.array(self.local[inside(box, mine)], order="C") for box in given]
        receives = [None if box is None else np.empty(shape_of(box), self.dtype) for box in taken]
        what = operation("ShardedArray.redistribute", self.layout, new, self.dtype)
        with topology.lock.turn(what):
            exchange(
                topology, *[[each if each is None else as_bytes(each) for each in way] for way in (sends, receives)]
            )
        for box, data in zip(taken, receives, strict=True):
            if box is not None:
                out[inside(box, wanted)] = data
        return ShardedArray(out, mesh, new)

    def _moves(self, source: int, target: int, box: Box | None) -> Box | None:
        """Return a box if the target gets it from this source: the one of several that is nearest to it."""
        here, there = self.mesh.place_of(source), self.mesh.place_of(target)
        nearest = all(here[name] == there[name] for name in here if name not in self.axes)
        return box if nearest else None

    def halo(
        self, width: int | Sequence[int], boundary: str | Sequence[str] = "periodic", constant: float = 0.0
    ) -> Halo:
        """Return the part of this rank with borders that hold the elements of its neighbors. Collective.

        The part moves into the memory of the halo: ``local`` is a view of its inside from now on.

        Parameters
        ----------
        width : int or sequence of int
            The border on both sides of each dimension; 0 for none.
        boundary : str or sequence of str
            At the ends of the whole array, of each dimension: ``"periodic"`` has the other end, ``"constant"`` a
            number, ``"reflect"`` the inside mirrored at the last element, as `numpy.pad`.
        constant : float

        Raises
        ------
        ValueError
            If a boundary is unknown, or a part is shorter than the border.

        Examples
        --------
        >>> import mpistrat
        >>> import numpy as np
        >>> mesh = mpistrat.experimental.Mesh(x=1)
        >>> u = mpistrat.experimental.ShardedArray.from_array(np.arange(3.0), mesh=mesh, axes=["x"])
        >>> u.halo(1).exchange()
        array([2., 0., 1., 2., 0.])
        """
        halo = Halo(self.local, self.mesh, self.layout, width, boundary, constant)
        self.local = halo.inner
        return halo


def matmul(left: Any, right: Any) -> ShardedArray:
    """Return the product of two matrices, of which one is cut. Collective if the inner dimension is cut.

    Where both are cut along the inner dimension, they must be cut equally, and the products of the parts are added. A
    plain array is taken as equal on all ranks. Raise ValueError if shapes or cuts do not fit.
    """
    some = left if isinstance(left, ShardedArray) else right
    mesh = some.mesh
    if any(isinstance(each, ShardedArray) and each.mesh is not mesh for each in (left, right)):
        raise ValueError(f"{left!r} and {right!r} are cut over different meshes")
    if left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[0]:
        raise ValueError(f"matmul multiplies matrices that fit, not the shapes {left.shape} and {right.shape}")
    left, right = (each if isinstance(each, ShardedArray) else _whole(each, mesh) for each in (left, right))
    inner = left.axes[1] or right.axes[0]
    # A factor that is whole along the inner dimension has the rows that the other one needs.
    if left.axes[1] is None and inner is not None:
        left = _cut(left, 1, right.layout, 0)
    elif right.axes[0] is None and inner is not None:
        right = _cut(right, 0, left.layout, 1)
    axes = left.axes[0], right.axes[1]
    if left.axes[1] != right.axes[0] or left.layout.cuts[1] != right.layout.cuts[0]:
        raise ValueError(f"{left!r} and {right!r} are cut differently along the inner dimension: redistribute one")
    if (axes[0] is not None and axes[0] in (axes[1], inner)) or (axes[1] is not None and axes[1] == inner):
        raise ValueError(f"the product of {left!r} and {right!r} would be cut twice by one axis: redistribute one")
    product = np.asarray(left.local @ right.local)
    if inner is not None:
        product = _all_reduce(mesh, inner, ReduceOp.SUM, product)
    shape = left.shape[0], right.shape[1]
    return ShardedArray(product, mesh, Layout(shape, axes, (left.layout.cuts[0], right.layout.cuts[1])))


def _whole(array: Any, mesh: Mesh) -> ShardedArray:
    array = as_numpy(array)
    return ShardedArray(array, mesh, Layout.of(mesh, array.shape, [None] * array.ndim))


def _cut(array: ShardedArray, dimension: int, like: Layout, of: int) -> ShardedArray:
    """Cut a dimension that every rank has whole, as a dimension of another array is cut."""
    axes, cuts = [*array.axes], [*array.layout.cuts]
    axes[dimension], cuts[dimension] = like.axes[of], like.cuts[of]
    layout = Layout(array.shape, tuple(axes), tuple(cuts))
    key = [slice(None)] * array.ndim
    key[dimension] = layout.box(array.mesh)[dimension]
    return ShardedArray(array.local[tuple(key)], array.mesh, layout)


def _all_reduce(mesh: Mesh, name: str, op: Op, part: np.ndarray) -> np.ndarray:
    ops = CollectiveAllReduce().bound_to(mesh.topology_along(name))
    total: np.ndarray = ops.all_reduce(op, [np.asarray(part, order="C")], CommunicationOptions())[0]
    return total


def _worst(dtype: np.dtype, op: Op) -> Any:
    """Return the number that never is the minimum, or the maximum."""
    limits: Any = np.iinfo(dtype) if dtype.kind in "iu" else None
    if dtype.kind == "b":
        return op is FurtherOp.MIN
    if limits is None:
        return np.inf if op is FurtherOp.MIN else -np.inf
    return limits.max if op is FurtherOp.MIN else limits.min


def _refuse(what: str) -> NoReturn:
    raise TypeError(f"{what} does not work on an array that is cut over ranks: {_REMEDY}")
