"""An array that is cut over the ranks of a mesh: domain decomposition, and layers over several ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from mpistrat.arrays.arrays import as_bytes, as_numpy
from mpistrat.collectives import CollectiveAllReduce, CommunicationOptions, structures
from mpistrat.collectives.movement.moves import all_gather, exchange
from mpistrat.collectives.operations import FurtherOp, Op, has_mean
from mpistrat.mesh.halo import Halo
from mpistrat.mesh.mesh import Axes, Box, Layout, Mesh, Parts, common, inside, joined, shape_of
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.topology import Topology
from mpistrat.values import ArrayLike, ReduceOp

# Arguments of NumPy that are not cut.
_PLAIN: tuple[type, ...] = (bool, int, float, complex, str, type, np.dtype, type(None))
# Functions of NumPy that work on parts, and functions that are methods here.
_OF_PARTS = {np.where, np.clip, np.round, np.isclose, np.nan_to_num, np.real, np.imag, np.copy}
_OF_PARTS |= {np.zeros_like, np.ones_like, np.full_like, np.empty_like}
_METHODS = {np.sum: "sum", np.prod: "prod", np.min: "min", np.max: "max", np.mean: "mean", np.dot: "dot"}
_METHODS |= {np.var: "var", np.std: "std", np.any: "any", np.all: "all"}
_UNSET = {"axis", "device", "dtype", "out", "shape", "where"}  # keywords that None leaves as they are
_REMEDY = "use gather() for the whole array, local for the part of this rank, or halo() for a part and its neighbors"


def _refuse(subject: str) -> NoReturn:
    raise TypeError(f"{subject} does not work on a ShardedArray: {_REMEDY}")


def _refusing(subject: str) -> Callable[..., NoReturn]:
    return lambda self, *args, **kwargs: _refuse(subject)


class ShardedArray(NDArrayOperatorsMixin):
    """An array of which each rank of a mesh has a part. Make one by `from_array`, `from_local` or `from_callback`.

    Operators and element-wise functions of NumPy work on the parts, without communication; so do `numpy.where`, `clip`,
    `round`, `isclose`, `nan_to_num`, and `zeros_like` and its kind. Reductions, `numpy.linalg.norm`, ``@``, `gather`,
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
    >>> mesh = mpistrat.Mesh(x=-1)
    >>> u = mpistrat.ShardedArray.from_array(np.arange(6.0), mesh=mesh, axes=("x",))
    >>> float((np.sqrt(u) ** 2 + u).sum()), float(u.max())
    (30.0, 5.0)
    >>> u.gather()
    array([0., 1., 2., 3., 4., 5.])
    """

    def __init__(self, local: np.ndarray, mesh: Mesh, layout: Layout):
        self.local, self.mesh, self.layout = local, mesh, layout

    # --- making ----------------------------------------------------------------------

    @classmethod
    def from_array(cls, array: Any, *, mesh: Mesh, axes: Axes, parts: Parts = None) -> ShardedArray:
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
        >>> mesh = mpistrat.Mesh(x=1)
        >>> made = mpistrat.ShardedArray.from_array(np.eye(2), mesh=mesh, axes=("x", None))
        >>> made.local.tolist()
        [[1.0, 0.0], [0.0, 1.0]]
        """
        with structures.refusals("ShardedArray", mesh.topology):
            whole = as_numpy(array)
        return cls.from_callback(
            whole.shape, lambda box: np.array(whole[box], whole.dtype, order="C"), mesh=mesh, axes=axes, parts=parts
        )

    @classmethod
    def from_callback(
        cls, shape: Sequence[int], function: Callable[[Box], Any], *, mesh: Mesh, axes: Axes, parts: Parts = None
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
        >>> mesh = mpistrat.Mesh(x=1)
        >>> file = {"u": np.ones((2, 2))}
        >>> read = lambda box: file["u"][box]
        >>> mpistrat.ShardedArray.from_callback((2, 2), read, mesh=mesh, axes=(None, "x"))
        <ShardedArray: (2, 2) float64, cut by (None, 'x'), here (2, 2)>
        """
        with structures.refusals("ShardedArray", mesh.topology):
            layout = Layout.of(mesh, shape, axes, parts)
            box = layout.box(mesh)
            local = np.asarray(as_numpy(function(box)), order="C")
            if local.shape != shape_of(box):
                raise ValueError(f"{box} has the shape {shape_of(box)}, and the function gave {local.shape}")
        structures.agree(mesh.topology, "ShardedArray", *layout, local.dtype)
        return cls(local, mesh, layout)

    @classmethod
    def from_local(cls, local: Any, *, mesh: Mesh, axes: Axes) -> ShardedArray:
        """Make an array of the parts that the ranks have. Collective. The array keeps the memory of ``local``.

        Raises
        ------
        ValueError
            On every rank, if the parts do not lie side by side: the message names ranks and shapes.

        Examples
        --------
        >>> import mpistrat
        >>> import numpy as np
        >>> mesh = mpistrat.Mesh(x=1)
        >>> mpistrat.ShardedArray.from_local(np.ones(3), mesh=mesh, axes=["x"]).shape
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
            for rank, local_shape in enumerate(shapes):
                position = 0 if name is None else mesh.place_of(rank)[mesh.axis(name).name]
                length, first = by_place.setdefault(position, (local_shape[dimension], rank))
                if length != local_shape[dimension]:
                    raise ValueError(
                        f"the parts do not lie side by side in dimension {dimension}: rank {first} has the shape "
                        f"{shapes[first]}, and rank {rank} at the same place of {name!r} has {local_shape}"
                    )
            lengths = [by_place[position][0] for position in sorted(by_place)]
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
    def size(self) -> int:
        """The number of elements of the whole array."""
        return math.prod(self.layout.shape)

    @property
    def box(self) -> Box:
        """The slices of the whole array that this rank has."""
        return self.layout.box(self.mesh)

    @property
    def offset(self) -> tuple[int, ...]:
        """Where the part of this rank begins."""
        return tuple(part.start for part in self.box)

    def __repr__(self) -> str:
        return f"<ShardedArray: {self.shape} {self.dtype}, cut by {self.axes}, here {self.local.shape}>"

    def __len__(self) -> int:
        return self.shape[0]

    device = "cpu"  # as the standard has it
    __bool__ = _refusing("bool()")
    __float__ = __int__ = __complex__ = _refusing("a conversion to a number")
    __setitem__ = _refusing("an index")
    __reduce__ = _refusing("pickle")

    def __getattr__(self, name: str) -> NoReturn:
        remedy = f": {_REMEDY}" if hasattr(np.ndarray, name) else ""
        raise AttributeError(f"a ShardedArray has no attribute {name!r}{remedy}")

    # --- elements --------------------------------------------------------------------

    def __getitem__(self, key: Any) -> ShardedArray:
        """Return a copy of the elements in slices of step 1, cut where this array is cut. Never communicates."""
        keys = key if isinstance(key, tuple) else (key,)
        if any(not isinstance(item, slice) or item.step not in (None, 1) for item in keys if item is not Ellipsis):
            _refuse("an index")
        at = keys.index(Ellipsis) if Ellipsis in keys else len(keys)
        before, after = keys[:at], keys[at + 1 :]
        between = self.ndim - len(before) - len(after)
        if between < 0 or Ellipsis in after:
            raise IndexError(f"the index {key} does not fit the shape {self.shape}")
        slices = zip((*before, *[slice(None)] * between, *after), self.shape, strict=True)
        bounds = [(start, max(start, stop)) for start, stop, _ in (part.indices(n) for part, n in slices)]
        ours = [np.clip((part.start, part.stop), *ends) for part, ends in zip(self.box, bounds, strict=True)]
        wanted = tuple(slice(int(start), int(stop)) for start, stop in ours)
        return ShardedArray(self.local[inside(wanted, self.box)].copy("C"), self.mesh, self.layout.sliced(bounds))

    @property
    def T(self) -> ShardedArray:
        """A copy with the dimensions, and their cuts, in the other order. Never communicates."""
        shape, axes, cuts = self.layout
        return ShardedArray(self.local.T.copy("C"), self.mesh, Layout(shape[::-1], axes[::-1], cuts[::-1]))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the array of every rank, if no axis cuts this one."""
        if any(name is not None for name in self.axes):
            _refuse("numpy.asarray")
        return self.local.astype(self.dtype if dtype is None else dtype, copy=bool(copy))

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        """Return functions of the array API standard. What does not work on parts raises TypeError by its name."""
        from mpistrat.mesh import array_api  # a late import: seldom used

        return array_api

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, ArrayLike) for value in inputs):
            return NotImplemented  # NumPy asks the variable, which reads its value
        if method == "__call__" and ufunc is np.matmul and not kwargs:
            return matmul(*inputs)
        if method != "__call__" or ufunc.signature is not None or "where" in kwargs:
            _refuse(f"numpy.{ufunc.__name__}" + ("" if method == "__call__" else f".{method}"))
        return _elementwise(ufunc, inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if any(issubclass(kind, ArrayLike) for kind in types):
            return NotImplemented  # NumPy asks the variable, which reads its value
        if function in (np.shape, np.ndim, np.size) and len(args) == 1:
            return getattr(args[0], function.__name__)
        kwargs = {name: value for name, value in kwargs.items() if value is not None or name not in _UNSET}
        n, is_plain = len(args), kwargs.keys().isdisjoint({"shape", "out", "where"})
        if function in _OF_PARTS and is_plain and n < 4 and (function is not np.where or n == 3):
            named = lambda *parts: function(*parts[:n], **dict(zip(kwargs, parts[n:], strict=True)))  # noqa: E731
            return _elementwise(named, (*args, *kwargs.values()), {})
        if function is np.roll:
            return roll(*args, **kwargs)
        if function is np.linalg.norm and len(args) == 1 and not kwargs:
            wide = args[0] if args[0].dtype.kind in "fc" else args[0].astype(np.float64)  # squares of int8 overflow
            return np.sqrt(np.square(np.abs(wide)).sum())
        if function not in _METHODS or not 0 < len(args) < 3 or not kwargs.keys() <= {"axis", "keepdims", "ddof"}:
            _refuse(" with ".join([f"numpy.{function.__name__}", *kwargs]))
        return getattr(ShardedArray, _METHODS[function])(*args, **kwargs)

    def astype(self, dtype: Any, copy: bool = True) -> ShardedArray:
        """Return the array with another dtype. Never communicates."""
        return ShardedArray(self.local.astype(dtype, copy=copy), self.mesh, self.layout)

    def copy(self) -> ShardedArray:
        """Return a copy with memory of its own. Never communicates."""
        return ShardedArray(self.local.copy(), self.mesh, self.layout)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedArray:
        return self.copy()

    # --- reductions ------------------------------------------------------------------

    def sum(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Any:
        """Return the sum over dimensions: a cut array, or a number where none is left. Collective.

        As NumPy, but that floating point numbers are added in another order.
        """
        return self._reduced(ReduceOp.SUM, np.sum, axis, keepdims)

    def prod(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Any:
        """Return the product, as `sum`. Collective."""
        return self._reduced(FurtherOp.PROD, np.prod, axis, keepdims)

    def min(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Any:
        """Return the minimum, as `sum`. Collective."""
        return self._reduced(FurtherOp.MIN, np.min, axis, keepdims)

    def max(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Any:
        """Return the maximum, as `sum`. Collective."""
        return self._reduced(FurtherOp.MAX, np.max, axis, keepdims)

    def any(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Any:
        """Return whether some elements are true, as `sum`. Collective."""
        return self._reduced(FurtherOp.MAX, np.any, axis, keepdims)

    def all(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Any:
        """Return whether all elements are true, as `sum`. Collective."""
        return self._reduced(FurtherOp.MIN, np.all, axis, keepdims)

    def mean(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Any:
        """Return the mean, as `sum`. Collective. Of integers in float64."""
        return self._mean_of(self._wide(), axis, keepdims, 0)

    def var(self, axis: int | Sequence[int] | None = None, keepdims: bool = False, ddof: int = 0) -> Any:
        """Return the variance, as `mean`, dividing by the number of elements less ``ddof``. Collective."""
        wide = self._wide()
        return self._mean_of(np.abs(wide - wide.mean(axis, True)) ** 2, axis, keepdims, ddof)

    def std(self, axis: int | Sequence[int] | None = None, keepdims: bool = False, ddof: int = 0) -> Any:
        """Return the standard deviation, as `var`. Collective."""
        return np.sqrt(self.var(axis, keepdims, ddof))

    def dot(self, other: Any) -> Any:
        """Return the product of vectors or matrices, ``self @ other``. Collective if the inner dimension is cut."""
        return self @ other

    def _wide(self) -> ShardedArray:
        """Return the array in the dtype in which NumPy adds up a mean: halves in float32."""
        return self.astype(np.result_type(self.dtype, np.float32 if has_mean(self.dtype) else np.float64))

    def _mean_of(self, wide: ShardedArray, axis: Any, keepdims: bool, less: int) -> Any:
        count = int(np.prod([self.shape[i] for i in self._dimensions(axis)])) - less
        # As NumPy, which divides by 0 where ``ddof`` is above the number of elements.
        mean = wide.sum(axis, keepdims) / wide.dtype.type(max(count, 0))
        return mean.astype(self.dtype) if self.dtype.kind != "c" and has_mean(self.dtype) else mean

    def _dimensions(self, axis: Any) -> tuple[int, ...]:
        if self.dtype.kind in "mM":  # else only the ranks with empty parts would raise
            _refuse(f"a reduction of {self.dtype}")
        dimensions = range(self.ndim) if axis is None else axis if isinstance(axis, Sequence) else (axis,)
        if any(not -self.ndim <= i < self.ndim for i in dimensions):
            raise ValueError(f"axis {axis} is out of range for the shape {self.shape}")
        return tuple(i % self.ndim for i in dimensions)

    def _reduced(self, op: Op, function: Callable[..., Any], axis: Any, keepdims: bool) -> Any:
        dimensions = self._dimensions(axis)
        options = {}
        if function in (np.min, np.max):
            if not all(self.shape[i] for i in dimensions):
                raise ValueError(f"an array of shape {self.shape} has no {op.name} over axis {axis}")
            if not self.local.size:  # the parts of other ranks decide
                options["initial"] = _worst(self.dtype, op)
        part = np.asarray(function(self.local, dimensions, keepdims=keepdims, **options))
        for name in filter(None, (self.axes[i] for i in dimensions)):
            if part.dtype.kind == "c" and op in (FurtherOp.MIN, FurtherOp.MAX):
                part = function(all_gather(Topology.of(self.mesh.comm(name)), part[None], 0), 0)  # MPI has no order
            else:
                part = _all_reduce(self.mesh, name, op, part)
        layout = self.layout.dropped(dimensions, keepdims)
        return ShardedArray(part, self.mesh, layout) if part.ndim else part[()]

    # --- movement --------------------------------------------------------------------

    def gather(self) -> np.ndarray:
        """Return the whole array, on every rank; in a replica of several ranks that of the replica. Collective."""
        whole = self.local
        for dimension, name in enumerate(self.axes):
            if name is not None:
                whole = all_gather(Topology.of(self.mesh.comm(name)), whole, dimension)
        return np.array(whole, order="C", copy=whole is self.local)  # a gathered array is new and contiguous already

    def redistribute(self, axes: Axes, parts: Parts = None) -> ShardedArray:
        """Return the array cut in another way. Collective. A rank sends only what another one does not have.

        Raises
        ------
        ValueError
            As `from_array`.
        """
        mesh, topology = self.mesh, self.mesh.topology
        with structures.refusals("ShardedArray.redistribute", topology):
            new = Layout.of(mesh, self.shape, axes, parts)
        own_box, wanted = self.box, new.box(mesh)
        out = np.empty(shape_of(wanted), self.dtype)
        ranks = range(mesh.size)
        outgoing = [self._moves(mesh.rank, rank, common(own_box, new.box(mesh, rank))) for rank in ranks]
        incoming = [self._moves(rank, mesh.rank, common(self.layout.box(mesh, rank), wanted)) for rank in ranks]
        # With its dtype: an index of an array without dimensions gives a number, in the byte order of this machine.
        sent = [None if box is None else self.local[inside(box, own_box)] for box in outgoing]
        sends = [None if data is None else np.array(data, self.dtype, order="C") for data in sent]
        receives = [None if box is None else np.empty(shape_of(box), self.dtype) for box in incoming]
        description = operation("ShardedArray.redistribute", self.layout, new, self.dtype)
        with topology.lock.collective(description):
            exchange(
                topology, *[[None if data is None else as_bytes(data) for data in way] for way in (sends, receives)]
            )
        for box, data in zip(incoming, receives, strict=True):
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

        The part moves into the memory of the halo: ``local`` is a view of its inside, until another halo is made.

        Parameters
        ----------
        width : int or sequence of int
            The border on both sides of each dimension; 0 for none.
        boundary : str or sequence of str
            At the ends of the whole array, of each dimension: ``"periodic"`` has the other end, ``"constant"`` (or
            ``"dirichlet"``) a number, ``"reflect"`` the inside mirrored at the last element, as `numpy.pad`, and
            ``"neumann"`` the inside mirrored behind it, which is ``mode="symmetric"`` there: no flux through the face.
        constant : float

        Raises
        ------
        ValueError
            If a boundary is unknown, or a part is shorter than the border.

        Examples
        --------
        >>> import mpistrat
        >>> import numpy as np
        >>> mesh = mpistrat.Mesh(x=1)
        >>> u = mpistrat.ShardedArray.from_array(np.arange(3.0), mesh=mesh, axes=["x"])
        >>> u.halo(1).exchange()
        array([2., 0., 1., 2., 0.])
        """
        return Halo(self, width, boundary, constant)


def _elementwise(function: Callable[..., Any], inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Apply a function to the parts of arrays, cut as all arrays together. Never communicates."""
    outs = kwargs.pop("out", ())
    values = _over_one_mesh((*inputs, *outs))
    arrays = [value for value in values if isinstance(value, ShardedArray)]
    layout, mesh = joined([array.layout for array in arrays]), arrays[0].mesh
    if layout is None:
        raise ValueError(f"{' and '.join(map(repr, arrays))} are cut differently: redistribute one, or use halo()")
    if any(not isinstance(out, ShardedArray) or out.layout != layout for out in outs):
        raise TypeError("out must be a ShardedArray that is cut as the result is")
    box = layout.box(mesh)
    parts = [
        v if isinstance(v, _PLAIN) else v.local if v.layout is layout else v.local[v.layout.key(box)] for v in values
    ]
    if outs:
        function(*parts[: len(inputs)], **kwargs, out=tuple(out.local for out in outs))
        return outs[0] if len(outs) == 1 else outs
    result = function(*parts, **kwargs)
    several = result if type(result) is tuple else (result,)
    results = tuple(ShardedArray(np.asarray(array), mesh, layout) for array in several)
    return results if type(result) is tuple else results[0]


def _over_one_mesh(values: Sequence[Any]) -> list[Any]:
    """Return values with plain arrays as arrays that every rank has whole. Numbers stay: NumPy decides their dtype."""
    cut = [array for array in values if isinstance(array, ShardedArray)]
    mesh = cut[0].mesh
    if any(array.mesh is not mesh for array in cut):
        shown = " and ".join(f"{array!r} over {array.mesh!r}" for array in cut)
        raise ValueError(f"{shown} lie on different meshes: make them on one")
    converted = [value if isinstance(value, (ShardedArray, *_PLAIN)) else as_numpy(value) for value in values]
    return [ShardedArray(e, mesh, Layout.uncut(e.shape)) if isinstance(e, np.ndarray) else e for e in converted]


def matmul(left: Any, right: Any) -> Any:
    """Return the product of matrices or vectors, of which one is cut. Collective if the inner dimension is cut."""
    left, right = _over_one_mesh((left, right))
    if any(getattr(factor, "ndim", 0) not in (1, 2) for factor in (left, right)) or left.shape[-1] != right.shape[0]:
        raise ValueError(f"matmul multiplies matrices that fit, not {left!r} and {right!r}")
    mesh = left.mesh
    (*rows, left_inner), (right_inner, *columns) = zip(*left.layout, strict=True), zip(*right.layout, strict=True)
    inner = joined([Layout(*zip(dimension, strict=True)) for dimension in (left_inner, right_inner)])
    if inner is None:
        raise ValueError(f"{left!r} and {right!r} are cut differently along the inner dimension: redistribute one")
    axes = [axis for _, axis, _ in (*rows, *zip(*inner, strict=True), *columns) if axis is not None]
    if len({*axes}) < len(axes):
        raise ValueError(f"the product of {left!r} and {right!r} would be cut twice by one axis: redistribute one")
    (part,) = inner.box(mesh)  # a factor that is whole along the inner dimension has what the other one needs
    first = left.local[..., part] if left_inner[1] is None else left.local
    product = np.asarray(first @ (right.local[part] if right_inner[1] is None else right.local))
    if inner.axes[0] is not None:
        op = FurtherOp.MAX if product.dtype == bool else ReduceOp.SUM
        product = _all_reduce(mesh, inner.axes[0], op, product)
    return ShardedArray(product, mesh, Layout(*zip(*rows, *columns, strict=True))) if product.ndim else product[()]


def roll(a: ShardedArray, shift: Any, axis: Any = None) -> ShardedArray:
    """Return an array of the same cut with elements that have moved along dimensions, as `numpy.roll`. Collective.

    Without ``axis`` it has one dimension.
    """
    topology = a.mesh.topology
    with structures.refusals("numpy.roll", topology):
        if axis is None and a.ndim != 1:
            _refuse("numpy.roll without axis")
        dimensions = np.atleast_1d(0 if axis is None else axis)
        if any(not -a.ndim <= dimension < a.ndim for dimension in dimensions):
            raise ValueError(f"axis {axis} is out of range for the shape {a.shape}")
        moves = tuple((int(by), int(dimension) % a.ndim) for by, dimension in np.broadcast(shift, dimensions))
    structures.agree(topology, "numpy.roll", *a.layout, moves)
    local = a.local
    for by, dimension in moves:
        name = a.axes[dimension]
        ranks = None if name is None else Topology.of(a.mesh.comm(name))
        if ranks is None or ranks.size == 1:
            local = np.roll(local, by, dimension)
        else:
            local = _rolled(ranks, local, by, dimension, a.layout.cuts[dimension])
    return ShardedArray(local.copy("C") if local is a.local else local, a.mesh, a.layout)


def _rolled(topology: Topology, local: np.ndarray, by: int, dimension: int, cuts: Sequence[int]) -> np.ndarray:
    """Return this rank's part of an array that the ranks have cut along a dimension, moved by some elements."""
    rows, rank, n = np.moveaxis(local, dimension, 0), topology.rank, cuts[-1]

    def moved(source: int, target: int) -> list[tuple[slice, slice]]:
        """Return rows of one rank that another one gets, in its order, as slices of the source and of the target."""
        start, length = (cuts[target] - by) % n, cuts[target + 1] - cuts[target]
        bounds = [(base, max(base, cuts[source]), min(base + length, cuts[source + 1])) for base in (start, start - n)]
        return [
            (slice(low - cuts[source], high - cuts[source]), slice(low - base, high - base))
            for base, low, high in bounds
            if low < high
        ]

    def joined_rows(slices: list[slice], array: np.ndarray) -> np.ndarray | None:
        return np.concatenate([array[part] for part in slices]) if slices else None

    out = np.empty(rows.shape, rows.dtype)
    targets = [[target for _, target in moved(source, rank)] for source in range(topology.size)]
    sends = [joined_rows([source for source, _ in moved(rank, target)], rows) for target in range(topology.size)]
    receives = [joined_rows(slices, out) for slices in targets]
    ways = [[None if data is None else as_bytes(data) for data in way] for way in (sends, receives)]
    with topology.lock.collective(operation("numpy.roll", (rows.dtype, rows.shape[1:]), by)):
        exchange(topology, *ways)
    for slices, part in zip(targets, receives, strict=True):
        for target in slices:
            assert part is not None
            length = target.stop - target.start
            out[target], part = part[:length], part[length:]
    return np.ascontiguousarray(np.moveaxis(out, 0, dimension))


def _all_reduce(mesh: Mesh, name: str, op: Op, part: np.ndarray) -> np.ndarray:
    ops, dtype = CollectiveAllReduce().bound_to(Topology.of(mesh.comm(name))), part.dtype
    sent = np.asarray(part, np.uint8 if dtype.kind == "b" else dtype, order="C")  # bool has no MAX and MIN
    return np.asarray(ops.all_reduce(op, [sent], CommunicationOptions())[0], dtype)


def _worst(dtype: np.dtype, op: Op) -> Any:
    """Return the number that never is the minimum, or the maximum."""
    if dtype.kind in "iu":
        return np.iinfo(dtype).max if op is FurtherOp.MIN else np.iinfo(dtype).min
    worst = np.inf if op is FurtherOp.MIN else dtype.kind != "b" and -np.inf
    return dtype.type(complex(worst, worst) if dtype.kind == "c" else worst)
