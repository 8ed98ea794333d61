"""Arrays that are cut over ranks are what NumPy has of the whole array."""

import copy
import functools
import importlib
import os
import pickle

import h5py
import numpy as np
import pytest
from array_api_compat import array_namespace
from mpi4py import MPI

from mpistrat import Mesh, ShardedArray
from mpistrat.data import Dataset, Writer
from mpistrat.runtime.agreement.operation import MismatchError, operation

SIZE = MPI.COMM_WORLD.size


def uneven(size, count):
    """Lengths of parts in about the ratio 7 to 3 to 7 to 3 ..., the last one may have no rows."""
    weights = np.resize([7, 3], count).cumsum()
    return np.diff([0, *(size * weights // weights[-1])]).tolist()


@functools.cache
def meshes():
    return [Mesh(x=SIZE), Mesh(x=1, y=-1), *([Mesh(x=2, y=2)] if SIZE == 4 else [])]


def arrays(dtype=np.float64, shape=(7, 10, 3)):
    whole = np.random.default_rng(5).normal(scale=9, size=shape).astype(dtype)
    for mesh in meshes():
        y = "y" if "y" in mesh.axes else None
        for axes in (("x", y, None), (y, "x", None), (None, None, "x")):
            yield whole, ShardedArray.from_array(whole, mesh=mesh, axes=axes)
        parts = {"x": uneven(shape[1], mesh.axes["x"])}
        yield whole, ShardedArray.from_array(whole, mesh=mesh, axes=(None, "x", None), parts=parts)


def test_gather_and_parts():
    for whole, u in arrays():
        assert u.local.tobytes() == whole[u.box].tobytes()
        assert u.gather().tobytes() == whole.tobytes()
        again = ShardedArray.from_local(u.local, mesh=u.mesh, axes=u.axes)
        assert again.layout == u.layout


@pytest.mark.parametrize(
    "key",
    [
        slice(1, -1),
        (slice(None), slice(2, 9)),
        (..., slice(1, None)),
        (slice(3, 4), ..., slice(0, 2)),
        (slice(5, 2), slice(-100, 100)),
        ...,
        (),
    ],
    ids=str,
)
def test_slices(key):
    for whole, u in arrays():
        part = u[key]
        assert (part.shape, part.axes) == (whole[key].shape, u.axes)
        assert part.gather().tobytes() == whole[key].tobytes()
        part += 1  # a copy
        assert part.local.tobytes() == (whole[key] + 1)[part.box].tobytes()
        np.testing.assert_allclose(part.sum(), whole[key].sum() + part.size)
        assert u.gather().tobytes() == whole.tobytes()


@pytest.mark.parametrize("key", [(slice(1),) * 4, (..., ...), (..., slice(1), ...)], ids=str)
def test_slices_that_do_not_fit(key):
    _, u = next(arrays())
    with pytest.raises(IndexError, match="does not fit the shape"):
        u[key]


def test_transposed():
    for whole, u in arrays():
        turned = u.T
        assert turned.axes == u.axes[::-1]
        assert turned.gather().tobytes() == np.ascontiguousarray(whole.T).tobytes()
        assert (turned * 2).T.gather().tobytes() == (whole * 2).tobytes()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int8])
def test_numbers_do_not_change_dtypes(dtype):
    for whole, u in arrays(dtype):
        for got, expected in ((u * 2, whole * 2), (1.5 - u, 1.5 - whole), (u > 1, whole > 1)):
            assert got.dtype == expected.dtype
            np.testing.assert_array_equal(got.gather(), expected)
        row = ShardedArray.from_array(whole[:1], mesh=u.mesh, axes=(None, *u.axes[1:])) if u.layout.axes[0] else None
        if row is not None and u.layout.cuts[1] == row.layout.cuts[1]:
            np.testing.assert_array_equal((u - row).gather(), whole - whole[:1])


def test_means_of_halves():
    ones = ShardedArray.from_array(np.full(70_000, 3, np.float16), mesh=meshes()[0], axes=["x"])
    assert ones.mean() == 3
    assert ones.mean().dtype == np.float16


def test_elements():
    for whole, u in arrays():
        v = np.exp(u / 9) * 2 - whole[0] + u.astype(np.float32)
        expected = np.exp(whole / 9) * 2 - whole[0] + whole.astype(np.float32)
        assert v.gather().tobytes() == expected.tobytes()
        assert (u > 0).gather().tolist() == (whole > 0).tolist()
        fraction, exponent = np.frexp(u)
        np.testing.assert_array_equal(np.ldexp(fraction, exponent).gather(), whole)
        w = u.copy()
        w += 1
        np.multiply(w, 2, out=w)
        assert w.gather().tobytes() == ((whole + 1) * 2).tobytes()


@pytest.mark.parametrize(
    "call",
    [
        lambda u, whole: np.where(u > 0, u, -1),
        lambda u, whole: np.where(u > whole[0], whole, u.astype(np.float32)),
        lambda u, whole: np.clip(u, -1, None),
        lambda u, whole: np.clip(u, a_min=whole[:1], a_max=u.dtype.type(5)),
        lambda u, whole: np.round(u, 1),
        lambda u, whole: np.isclose(u, whole + 1e-12),
        lambda u, whole: np.zeros_like(u, dtype=np.int16),
        lambda u, whole: np.full_like(u, 3, order="C"),
        lambda u, whole: np.ones_like(u) + np.zeros_like(np.empty_like(u)),
        lambda u, whole: np.linalg.norm(u * u.dtype.type(2)) * u.size + np.size(u) + np.ndim(u) + np.shape(u)[0],
        lambda u, whole: np.real(u * 1j) + np.copy(u),
        lambda u, whole: np.sum(u, axis=0),
        lambda u, whole: np.std(u, axis=(0, 2), ddof=1, keepdims=True),
        lambda u, whole: np.var(u * 1j),
        lambda u, whole: np.any(u > 30, axis=np.int64(0)),
        lambda u, whole: np.all(u, axis=(0, 1)),
        lambda u, whole: np.max(u > 9),
        lambda u, whole: np.max(u, 1) - np.min(u, 1),
        lambda u, whole: u - u.mean(axis=1, keepdims=True) * u.max(axis=(0, 2), keepdims=True),
    ],
)
def test_functions_and_broadcasting(call):
    for whole, u in arrays():
        got, expected = call(u, whole), call(whole, whole)
        got = got.gather() if isinstance(got, ShardedArray) else got
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        np.testing.assert_allclose(got, expected, rtol=1e-9)


def test_dimensions_that_are_not_cut():
    """They grow from a length of 1, and are cut as the other array is."""
    mesh = meshes()[0]
    column = ShardedArray.from_array(np.arange(7.0)[:, None], mesh=mesh, axes=("x", None))
    row = ShardedArray.from_array(np.arange(3.0)[None], mesh=mesh, axes=(None, None))
    flat = ShardedArray.from_array(np.arange(7.0), mesh=mesh, axes=["x"])
    whole = ShardedArray.from_array(np.arange(7.0), mesh=mesh, axes=[None])
    expected = np.arange(7.0)[:, None] * np.arange(3.0)
    for product in (column * row, row * column, column * np.arange(3.0)):
        np.testing.assert_array_equal(product.gather(), expected)
    assert (flat + whole).axes == (whole - flat).axes == ("x",)
    np.testing.assert_array_equal((np.ones((2, 7)) * (flat + whole)).gather(), np.ones((2, 7)) * 2 * np.arange(7.0))
    with pytest.raises(ValueError, match="cut differently"):
        column * flat  # the result would be cut twice by one axis
    with pytest.raises(TypeError, match="cut as the result is"):
        np.add(row, column, out=row)


def test_without_dimensions():
    u = ShardedArray.from_array(np.float64(3), mesh=meshes()[0], axes=())
    for each in (u, u * 2 / 2, ShardedArray.from_local(3.0, mesh=meshes()[0], axes=())):
        assert each.gather().tolist() == each.sum() == each.halo(1).exchange() == 3


def test_copies():
    mesh = meshes()[0]
    u = ShardedArray.from_array(np.arange(7.0), mesh=mesh, axes=["x"])
    for each in (copy.copy(u), copy.deepcopy({"u": [u]})["u"][0]):
        each += 1
        assert each.mesh is copy.deepcopy(mesh) is mesh
    assert u.gather().tolist() == [*range(7)]
    with pytest.raises(TypeError, match=r"pickle does not work .* use gather\(\)"):
        pickle.dumps(u)
    other = ShardedArray.from_array(np.arange(7.0), mesh=Mesh(x=SIZE), axes=["x"])  # a mesh made separately
    assert (u @ other, (u + other).sum()) == (91, 42)
    apart = ShardedArray.from_array(np.arange(7.0), mesh=Mesh(x=1, comm=MPI.COMM_SELF), axes=["x"])
    with pytest.raises(ValueError, match="different meshes"):
        u + (apart if SIZE > 1 else ShardedArray.from_array(np.arange(7.0), mesh=meshes()[1], axes=["x"]))


@pytest.mark.parametrize("name", ["sum", "prod", "min", "max", "mean", "var", "std"])
@pytest.mark.parametrize("dtype", [np.float64, np.int16])
def test_reductions(name, dtype):
    for whole, u in arrays(dtype):
        for axis in (None, 0, -1, (0, 2)):
            for keepdims in (False, True):
                got = getattr(u, name)(axis, keepdims)
                got = got.gather() if isinstance(got, ShardedArray) else got
                expected = getattr(whole, name)(axis, keepdims=keepdims)
                assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
                np.testing.assert_allclose(got, expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", ">f4", "complex64", ">c16"])
@pytest.mark.parametrize("rows", [1, 7])
def test_reductions_of_rare_dtypes(dtype, rows):
    """One rank or more may have no rows. Halves are added in float32: more exact than what NumPy has of bfloat16."""
    importlib.import_module("ml_dtypes")  # lets NumPy know bfloat16
    real, imaginary = np.random.default_rng(7).integers(-3, 4, (2, rows, 5))
    whole = (real + 1j * imaginary if "c" in dtype else real).astype(dtype)
    digits = 1e-2 if "16" in dtype and "c" not in dtype else 1e-6
    for mesh, cuts in [(meshes()[0], {}), (meshes()[0], {"x": uneven(rows, SIZE)})]:
        u = ShardedArray.from_array(whole, mesh=mesh, axes=("x", None), parts=cuts)
        for name in ("sum", "min", "max", "mean", "var", "std"):
            for axis in (None, 0, 1):
                got, expected = getattr(u, name)(axis), getattr(whole, name)(axis)
                got = got.gather() if isinstance(got, ShardedArray) else got
                assert got.dtype.newbyteorder("=") == expected.dtype.newbyteorder("=")
                exact = getattr(whole.astype(complex if "c" in dtype else float), name)(axis)
                np.testing.assert_allclose(got.astype(exact.dtype), exact, digits, digits)
                if name in ("min", "max"):
                    np.testing.assert_array_equal(got, expected)
        norm, expected = np.linalg.norm(u), np.linalg.norm(whole)
        assert norm.dtype == expected.dtype
        np.testing.assert_allclose(norm, expected, digits)


def test_complex_numbers_are_ordered_as_in_numpy():
    for whole in ([1 + 2j, 1 - 1j, 0 + 9j, 0 + 8j], [3j, complex(np.nan, 1), 0], [complex(np.inf, np.inf)]):
        u = ShardedArray.from_array(np.array(whole), mesh=meshes()[0], axes=["x"])
        assert repr((u.min(), u.max())) == repr((np.min(whole), np.max(whole)))


@pytest.mark.parametrize("dtype", [">f8", ">i4", ">c8", "<f8"])
@pytest.mark.parametrize("shape", [(), (1,), (5, 2)])
def test_bytes_keep_their_order(dtype, shape):
    """A part without dimensions, if indexed, was a number of NumPy, which has the order of this machine."""
    whole = np.arange(1, 1 + np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    for axes in ((None,) * len(shape), ("x", None)[: len(shape)]):
        u = ShardedArray.from_array(whole, mesh=meshes()[0], axes=axes)
        again = u.redistribute((None,) * len(shape))
        for got in (u.gather(), again.local, again.gather(), u.redistribute(axes).gather()):
            assert (got.dtype.str, got.tobytes(), got.shape) == (dtype, whole.tobytes(), shape)


def test_redistribute():
    for whole, u in arrays():
        for axes in ((None, "x", None), ("x", None, None), (None, None, None)):
            v = u.redistribute(axes)
            assert v.local.tobytes() == whole[v.box].tobytes()
        parts = {"x": uneven(7, u.mesh.axes["x"])}
        v = u.redistribute(("x", None, None), parts)
        assert v.gather().tobytes() == whole.tobytes()


@pytest.mark.parametrize(
    ("left", "right"),
    [(("x", None), (None, None)), ((None, "x"), ("x", None)), ((None, None), (None, "x")), ((None, "x"), (None, None))],
)
def test_matmul(left, right):
    a, b = (np.random.default_rng(2).normal(size=shape) for shape in ((5, 7), (7, 6)))
    for mesh in meshes():
        u, v = (ShardedArray.from_array(m, mesh=mesh, axes=axes) for m, axes in ((a, left), (b, right)))
        for product in (u @ v, u @ b, a @ v, u.dot(v), np.dot(a, v)):
            np.testing.assert_allclose(product.gather(), a @ b, rtol=1e-12)
        np.testing.assert_array_equal(((u > 0.5) @ (v > 0.5)).gather(), (a > 0.5) @ (b > 0.5))
        row, column = (
            ShardedArray.from_array(each, mesh=mesh, axes=[axis])
            for each, axis in ((a[0], left[1]), (b[:, 0], right[0]))
        )
        np.testing.assert_allclose((u @ column).gather(), a @ b[:, 0], rtol=1e-12)
        np.testing.assert_allclose((row @ v).gather(), a[0] @ b, rtol=1e-12)
        np.testing.assert_allclose([row @ column, row @ b[:, 0]], [a[0] @ b[:, 0]] * 2, rtol=1e-12)


@pytest.mark.parametrize("boundary", ["periodic", "constant", "reflect", "dirichlet", "neumann"])
@pytest.mark.parametrize("width", [1, (1, 2, 1), (0, 1, 0)])
@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int8])
def test_halo(boundary, width, dtype):
    mode = {"periodic": "wrap", "dirichlet": "constant", "neumann": "symmetric"}.get(boundary, boundary)
    widths = np.broadcast_to(width, 3)
    for whole, u in arrays(dtype, (12, 17, 8)):
        padded = np.pad(whole, [(w, w) for w in widths], mode=mode)
        halo = u.halo(width, boundary)
        wanted = tuple(slice(s.start, s.stop + 2 * w) for s, w in zip(u.box, widths, strict=True))
        for _ in range(2):
            assert halo.exchange().tobytes() == padded[wanted].tobytes()
        halo.inner[...] += 1
        np.testing.assert_array_equal(u.gather(), whole + np.asarray(1, dtype))


@pytest.mark.parametrize("dtype", [np.float64, np.complex64, np.dtype(">i2"), bool])
@pytest.mark.parametrize(
    ("shift", "axis"), [(0, 0), (1, 0), (-5, 1), (100, 2), ((1, -3), (0, 1)), ((2, 3), 0), (4, (0, 2)), (7, -1)]
)
def test_roll(shift, axis, dtype):
    for whole, u in arrays(dtype, (12, 17, 8)):
        rolled = np.roll(u, shift, axis)
        assert (rolled.axes, rolled.box, rolled.dtype) == (u.axes, u.box, u.dtype)
        np.testing.assert_array_equal(rolled.gather(), np.roll(whole, shift, axis))
        np.testing.assert_array_equal(u.gather(), whole)


def test_roll_of_one_dimension_needs_no_axis():
    u = ShardedArray.from_array(np.arange(13), mesh=meshes()[0], axes=["x"])
    np.testing.assert_array_equal(np.roll(u, 4).gather(), np.roll(np.arange(13), 4))


@pytest.mark.skipif(SIZE == 1, reason="for several ranks")
def test_ranks_that_roll_by_other_shifts_raise():
    u = ShardedArray.from_array(np.arange(13), mesh=meshes()[0], axes=["x"])
    with pytest.raises(MismatchError):
        np.roll(u, MPI.COMM_WORLD.rank)
    np.testing.assert_array_equal(np.roll(u, 1).gather(), np.roll(np.arange(13), 1))


def test_array_that_no_axis_cuts_is_whole():
    u = ShardedArray.from_array(np.ones((8, 2)), mesh=meshes()[0], axes=(None, None))
    assert np.asarray(u) is u.local
    copy = np.array(u, np.float32)
    assert copy.dtype == np.float32
    assert np.array(u) is not u.local


def test_a_constant_stays():
    u = ShardedArray.from_array(np.zeros((8, 2)), mesh=meshes()[0], axes=("x", None))
    halo = u.halo(1, "constant", constant=7)
    expected = halo.exchange().copy()
    halo.block[...] = 1
    halo.adjoint()
    halo.inner[...] = 0
    np.testing.assert_array_equal(halo.exchange(), expected)
    if SIZE == 1:
        assert (expected == 7).sum() == 2 * 4 + 2 * 8


@pytest.mark.parametrize("boundary", ["periodic", "constant", "neumann", ("reflect", "constant", "periodic")])
def test_adjoint(boundary):
    """The scalar product of w with the exchange of u is that of the adjoint of w with u."""
    for whole, u in arrays(np.float64, (12, 17, 8)):
        halo = u.halo(2, boundary)
        rng = np.random.default_rng(MPI.COMM_WORLD.rank + 7)
        w = rng.normal(size=halo.block.shape)
        before = u.mesh.parent.allreduce((halo.exchange() * w).sum())
        halo.block[...] = w
        folded = halo.adjoint().copy()
        after = u.mesh.parent.allreduce((folded * whole[u.box]).sum())
        np.testing.assert_allclose(after, before, rtol=1e-10)


def steps_of(u, kind, steps):
    """Heat and wave equations of a part with its halo."""
    halo, before = u.halo(1, ("periodic", "constant")), u.local.copy()
    for _ in range(steps):
        block = halo.exchange()
        laplace = block[:-2, 1:-1] + block[2:, 1:-1] + block[1:-1, :-2] + block[1:-1, 2:] - 4 * halo.inner
        if kind == "heat":
            halo.inner[...] += 0.2 * laplace
        else:
            before, now = halo.inner.copy(), before
            halo.inner[...] = 2 * before - now + 0.3 * laplace
    return u.gather()


@pytest.mark.parametrize("kind", ["heat", "wave"])
def test_equations_have_the_bits_of_one_rank(kind):
    start = np.random.default_rng(3).normal(size=(37, 41))
    alone = ShardedArray.from_array(start, mesh=Mesh(comm=MPI.COMM_SELF, x=1), axes=("x", None))
    expected = steps_of(alone, kind, 30)
    for mesh in meshes():
        y = "y" if "y" in mesh.axes else None
        for parts in ({}, {"x": uneven(37, mesh.axes["x"])}):
            u = ShardedArray.from_array(start, mesh=mesh, axes=("x", y), parts=parts)
            assert steps_of(u, kind, 30).tobytes() == expected.tobytes()


@pytest.mark.skipif(SIZE < 8, reason="tests/replicas/test_eight_ranks.py starts eight")
@pytest.mark.parametrize("kind", ["heat", "wave"])
def test_equations_over_some_on_eight_ranks(kind):
    """Meshes of 3x2 over six of the ranks, and of two with 70 and 30 rows over the others."""
    start = np.random.default_rng(3).normal(size=(100, 41))
    alone = ShardedArray.from_array(start, mesh=Mesh(comm=MPI.COMM_SELF, x=1), axes=("x", None))
    of_six = MPI.COMM_WORLD.rank < 6
    comm = MPI.COMM_WORLD.Split(of_six)
    mesh = Mesh(comm=comm, x=3, y=2) if of_six else Mesh(comm=comm, x=2, y=1)
    parts = {} if of_six else {"x": [70, 30]}
    u = ShardedArray.from_array(start, mesh=mesh, axes=("x", "y"), parts=parts)
    assert steps_of(u, kind, 30).tobytes() == steps_of(alone, kind, 30).tobytes()


@pytest.mark.parametrize("axes", [("x", None), (None, "x")])
@pytest.mark.parametrize("name", ["u.h5", "u.zarr"])
def test_files_by_parts(name, axes, tmp_path):
    mesh, whole = meshes()[0], np.random.default_rng(4).normal(size=(10, 20))
    u = ShardedArray.from_array(whole, mesh=mesh, axes=axes, parts={"x": uneven(whole.shape[axes.index("x")], SIZE)})
    with Writer(tmp_path / name) as writer:
        writer.append("u", u)
        writer.append("u", u + 1)
        for each in (u, u + 1):  # what all ranks have is written once
            writer.append("row", each.mean(axis=0))
            writer.append("column", each.mean(axis=1))
            writer.append("number", ShardedArray.from_array(each.max(), mesh=mesh, axes=()))
    file = h5py.File(tmp_path / name) if name == "u.h5" else pytest.importorskip("zarr").open(tmp_path / name, mode="r")
    read = ShardedArray.from_callback(u.shape, lambda box: file["u"][(1, *box)], mesh=mesh, axes=axes)
    np.testing.assert_array_equal(read.gather(), whole + 1)
    for name, rows in (("row", whole.mean(axis=0)), ("column", whole.mean(axis=1)), ("number", whole.max())):
        np.testing.assert_allclose(file[name][...], [rows, rows + 1])


def test_array_api():
    """Functions of the standard, by `array_api_compat`, on a cut array and on the whole one."""
    calls = {
        "standardize": lambda xp, a: (a - xp.mean(a, axis=0)) / xp.std(a, axis=0, correction=1),
        "softmax": lambda xp, a: (e := xp.exp(a - xp.max(a, axis=1, keepdims=True))) / xp.sum(e, axis=1, keepdims=True),
        "linear": lambda xp, a: xp.astype(xp.matmul(a, xp.ones((2, 3))), xp.float32, copy=False),
        "count": lambda xp, a: xp.sum(xp.astype(xp.where(a > 1, xp.zeros_like(a), a) == 0, xp.int64), axis=0),
        "wider": lambda xp, a: xp.asarray(a, dtype=xp.result_type(a, xp.float32)) + xp.pi,
        "copy": lambda xp, a: xp.asarray(a, copy=True) * xp.asarray([1.0, 2.0]),
    }
    whole = np.random.default_rng(2).normal(size=(9, 2))
    u = ShardedArray.from_array(whole, mesh=meshes()[0], axes=("x", None))
    assert array_namespace(u, u + 1).asarray(u) is u
    for name, call in calls.items():
        got, expected = call(array_namespace(u), u), call(array_namespace(whole), whole)
        assert got.dtype == expected.dtype, name
        np.testing.assert_allclose(got.gather(), expected, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda u: u[0], "an index does not work on a ShardedArray"),
        (lambda u: np.asarray(u), r"asarray does not work .* use gather\(\)"),
        (lambda u: np.concatenate([u, u]), "numpy.concatenate does not work"),
        (lambda u: np.add.reduce(u), "numpy.add.reduce does not work"),
        (lambda u: np.sum(u, dtype=np.float32), r"numpy.sum with dtype does not work .* use gather\(\)"),
        (lambda u: np.sum(u, 0, np.float32), r"numpy.sum does not work .* use gather\(\)"),
        (lambda u: np.zeros_like(u, shape=(3,)), "numpy.zeros_like with shape does not work"),
        (lambda u: [*u], "an index does not work"),
        (lambda u: np.roll(u, 1), "numpy.roll without axis does not work"),
        (lambda u: u[::2], "an index does not work"),
        (lambda u: u[1:, [0]], "an index does not work"),
        (lambda u: u.__setitem__(slice(1), 0), "an index does not work"),
        (lambda u: np.where(u > 0), r"numpy.where does not work .* use gather\(\)"),
        (lambda u: bool(u == u), "bool.. does not work"),
        (lambda u: float(u), r"a number does not work .* use gather\(\)"),
        (lambda u: u.redistribute(("x", None), parts=[8]), "parts must be lengths by axis"),
        (lambda u: np.add(u, 1, out=np.ones((8, 2))), "out must be a ShardedArray"),
        (lambda u: u.__array_namespace__().reshape(u, (4, 4)), "numpy.reshape does not work"),
        (lambda u: u.__array_namespace__().linalg.qr(u), "numpy.qr with mode does not work"),
        (lambda u: u.__array_namespace__().cumulative_sum(u, axis=0), "numpy.cumsum with axis does not work"),
        (lambda u: Mesh.for_grid((2, 2)), "number of dimensions, not .2, 2.: Mesh takes the size"),
    ],
)
def test_what_it_cannot_do(call, message):
    u = ShardedArray.from_array(np.ones((8, 2)), mesh=meshes()[0], axes=("x", None))
    with pytest.raises(TypeError, match=message):
        call(u)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda mesh, u: u.redistribute(("z", None)), "the mesh has no axis 'z': it has 'x'"),
        (lambda mesh, u: u.redistribute(("x", "x")), "names one twice"),
        (lambda mesh, u: u.redistribute(("x",)), "must have an axis or None for each dimension"),
        (lambda mesh, u: u.redistribute(("x", None), {"x": [1]}), "lengths that make up the 8 rows"),
        (lambda mesh, u: u.redistribute((None, None), {"x": [8]}), "which cut no dimension"),
        (lambda mesh, u: u.halo(9, "periodic"), "needs at least 9 rows on each rank"),
        (lambda mesh, u: u.halo(1, "mirror"), "must be one of periodic, constant, reflect, dirichlet, neumann"),
        (lambda mesh, u: u.halo((1, 2, 3)), "one value for each of 2 dimensions"),
        (lambda mesh, u: u.halo(1.0), "must be an int of at least 0, not 1.0"),
        (lambda mesh, u: u.astype(int).halo(1, "constant", 0.5), "int64 cannot hold the constant 0.5"),
        (lambda mesh, u: u.halo(1, "constant", "zero"), "could not convert string"),
        (lambda mesh, u: u.sum(2), "axis 2 is out of range"),
        (lambda mesh, u: np.roll(u, 1, 2), "axis 2 is out of range"),
        (lambda mesh, u: Mesh.for_grid(4), "from 1 to 3"),
        (lambda mesh, u: u.sum((0, -2)), "duplicate value"),
        (lambda mesh, u: u @ 3.0, "matrices that fit"),
        (lambda mesh, u: u + np.ones((3, 2)), "do not fit together"),
        (
            lambda mesh, u: ShardedArray.from_callback(
                (8, 2), lambda box: u.local[..., None], mesh=mesh, axes=("x", None)
            ),
            "and the function gave",
        ),
        (lambda mesh, u: u @ np.ones((3, 2)), "matrices that fit"),
        (lambda mesh, u: u + u.redistribute((None, "x")), "are cut differently"),
    ],
)
def test_wrong_arguments(call, message):
    mesh = meshes()[0]
    u = ShardedArray.from_array(np.ones((8, 2)), mesh=mesh, axes=("x", None))
    with pytest.raises(ValueError, match=message):
        call(mesh, u)
    assert u.sum() == 16  # the ranks are in step


def test_parts_that_do_not_fit():
    mesh, rank = meshes()[0], MPI.COMM_WORLD.rank
    axes, message = (("x", None), "not lie side by side in dimension 1") if SIZE > 1 else (("x",), "axes")
    part = np.ones((2, 3 + (rank == SIZE - 1)))
    with pytest.raises(ValueError, match=message):
        ShardedArray.from_local(part, mesh=mesh, axes=axes)
    length = 12 if rank == 0 else 4
    with pytest.raises(ValueError if rank == 0 else RuntimeError):
        ShardedArray.from_callback((4,), lambda box: np.ones(length), mesh=mesh, axes=(None,))
    assert ShardedArray.from_local(np.ones(2), mesh=mesh, axes=["x"]).shape == (2 * SIZE,)


def test_other_calls_on_one_rank():
    if SIZE == 1:
        pytest.skip("for several ranks")
    u = ShardedArray.from_array(np.ones(8), mesh=meshes()[0], axes=["x"])
    with pytest.raises(RuntimeError):
        u.sum() if MPI.COMM_WORLD.rank == 0 else u.max()
    assert u.sum() == 8


def test_exchanges_follow_the_rules_of_collectives():
    """Not in another one, not while a batch is made; a rank that leaves one by an error tells the others."""
    mesh = Mesh(x=-1, comm=MPI.COMM_WORLD.Dup())  # the ranks are not in step afterwards
    u = ShardedArray.from_array(np.ones((4 * SIZE, 3)), mesh=mesh, axes=("x", None))
    halo = u.halo(1, "constant")
    for _ in range(3):
        halo.exchange()
    rows = Dataset.range(4).batch(2).map(lambda x: halo.exchange()).prefetch(1)
    with pytest.raises(RuntimeError, match=r"ShardedArray\.halo was called while a batch was made"):
        list(rows)
    if SIZE > 1:
        with (
            mesh.topology.lock.collective(operation("other")),
            pytest.raises(RuntimeError, match="in a collective of the"),
        ):
            halo.exchange()
    assert halo.exchange().sum() == 3 * (4 + (mesh.coordinates["x"] > 0) + (mesh.coordinates["x"] < SIZE - 1))
    if mesh.rank == 0:
        halo.block.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            halo.exchange()
    else:
        halo.exchange()
    if SIZE > 1:
        with pytest.raises(MismatchError, match=r"ShardedArray\.halo.* was interrupted by ValueError"):
            u.halo(1)


@pytest.mark.skipif(SIZE == 1, reason="for several ranks")
def test_exchanges_in_another_order():
    comm = MPI.COMM_WORLD.Dup()  # the ranks are not in step afterwards
    whole, mesh = np.zeros((4 * SIZE, 3), int), Mesh(x=-1, comm=comm)
    of_y = ShardedArray.from_array(whole + 1, mesh=Mesh(y=-1, comm=comm), axes=("y", None))  # by the same communicator
    arrays = [ShardedArray.from_array(whole, mesh=mesh, axes=("x", None)), of_y]
    halos = [each.halo(1) for each in arrays]
    for each in (*halos, *halos[::-1]):
        assert (each.exchange() == each.block[0, 0]).all()
    if mesh.rank:
        call, other = halos[0].exchange, "halo 1" if SIZE == 2 else "the adjoint of halo 0"
    else:
        call, other = (halos[1].exchange if SIZE == 2 else halos[0].adjoint), "halo 0"
    if mesh.rank in (0, 1, SIZE - 1):  # the others have no neighbor that is in another halo
        with pytest.raises(MismatchError, match=f"in halo . of the mesh, and rank . in {other}"):
            call()
    else:
        call()


def test_a_later_halo_takes_the_array():
    u = ShardedArray.from_array(np.ones(4 * SIZE), mesh=meshes()[0], axes=["x"])
    before, after = u.halo(1), u.halo(2)
    with pytest.raises(RuntimeError, match="use the last one made"):
        before.exchange()
    u += 1
    assert after.exchange().tolist() == [2] * 8
    u.local = u.local + 1
    with pytest.raises(RuntimeError, match="use the last one made"):
        after.adjoint()
    assert u.halo(1).exchange().tolist() == [3] * 6


def test_meshes_leave_nothing_open():
    def use(comm):
        u = ShardedArray.from_array(np.ones(4 * SIZE), mesh=Mesh(x=SIZE, comm=comm), axes=["x"])
        u.halo(1).exchange()
        assert u.sum() == 4 * SIZE

    def use_a_copy():
        comm = MPI.COMM_WORLD.Dup()
        use(comm)
        comm.Free()

    for call in (lambda: use(MPI.COMM_WORLD), use_a_copy):
        call()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            call()
        assert len(os.listdir("/proc/self/fd")) <= before + 1  # the other tests may close and open some


def test_what_would_be_another_number_is_refused():
    """A mask that is lost, a part that passes for the whole, a time of which some ranks have none."""
    mesh = Mesh(x=-1)
    masked = np.ma.masked_array(np.ones(4 * SIZE), mask=[True] * SIZE + [False] * 3 * SIZE)
    for make in (ShardedArray.from_array, ShardedArray.from_local):
        with pytest.raises(TypeError, match="masked arrays"):
            make(masked, mesh=mesh, axes=["x"])
    u = ShardedArray.from_array(np.ones((4 * SIZE, 2)), mesh=mesh, axes=["x", None])
    with pytest.raises(TypeError, match="masked arrays"):
        u + np.ma.masked_array([1.0, 2.0], mask=[True, False])
    with pytest.raises(AttributeError, match=r"no attribute 'flat': use gather\(\)"):
        u.flat  # noqa: B018
    times = ShardedArray.from_array(np.zeros(1, "M8[s]"), mesh=mesh, axes=["x"], parts={"x": [1] + [0] * (SIZE - 1)})
    with pytest.raises(TypeError, match="datetime64"):
        times.max()
