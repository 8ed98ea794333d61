"""Sums that no order, layout or grouping changes: bits compared with the exact sum, rounded once."""

import hashlib
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import layouts, on_nodes
from mpi4py import MPI

import mpistrat
from mpistrat import metrics
from mpistrat.collectives import CollectiveAllReduce
from mpistrat.collectives.algorithms import exact
from mpistrat.strategy import axis_reduction

pytestmark = pytest.mark.four_ranks

SIZE, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
EXACT = mpistrat.experimental.CommunicationOptions(implementation="exact")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(params=[*layouts("0000", "0011", "0001", "0101"), "no memory"])
def nodes(request, monkeypatch):
    """A strategy whose ranks are spread over nodes, and whose pieces are small."""
    monkeypatch.setattr(exact, "_BLOCK", 1_000)
    small = {"alone_bytes": 1_000, "exact_ring_bytes": 2_000, "same_place_bytes": 1_000}
    if request.param == "no memory":
        comm = on_nodes("0000", slot_bytes=0, **small)
    else:
        comm = on_nodes(request.param, slot_bytes=12_000, slot_bytes_between_nodes=12_000, **small)
    yield mpistrat.MultiWorkerMirroredStrategy(comm=comm, communication_options=EXACT)
    comm.Free()


@pytest.fixture
def exactly():
    return mpistrat.MultiWorkerMirroredStrategy(communication_options=EXACT)


def bits(array):
    return np.asarray(array).tobytes()


def rounded(values, dtype):
    """The sum of some floats by rational arithmetic, rounded once."""
    values = [float(each) for each in values]
    if not all(map(math.isfinite, values)):
        with np.errstate(invalid="ignore"):
            total = np.sum([each for each in values if not math.isfinite(each)])
        return dtype.type(np.nan if np.isnan(total) else total)
    total = sum(map(Fraction, values), Fraction())
    try:
        near = np.float64(total.numerator / total.denominator)
    except OverflowError:
        return dtype.type(np.inf if total > 0 else -np.inf)
    left = total - Fraction(float(near))
    if dtype.itemsize == 4 and left and not near.view(np.int64) & 1:
        near = np.nextafter(near, np.inf if left > 0 else -np.inf)  # an odd last bit: it cannot be a tie
    with np.errstate(over="ignore"):
        return dtype.type(near)


def wild(random, shape, dtype):
    """Values of all magnitudes, with cancellation, zeros, subnormals, and what is beyond finite."""
    limits = np.finfo(dtype)
    span = random.integers(0, 2 * limits.maxexp, shape[-1])
    exponents = random.integers(-40, 41, shape[-1]) + random.integers(-span, span + 1, shape)
    lowest = limits.minexp - limits.nmant
    values = np.ldexp(random.uniform(-1, 1, shape), np.clip(exponents, lowest, limits.maxexp - 20))
    values[random.random(shape) < 0.1] = 0
    if shape[0] > 1:
        values[-1, ::3] = -values[0, ::3]
    for special in (np.inf, -np.inf, np.nan):
        values[random.random(shape) < 0.01] = special
    return values.astype(dtype)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_elementwise_in_any_order_and_layout(nodes, dtype):
    dtype = np.dtype(dtype)
    tame = np.random.default_rng(0).normal(size=(SIZE, 2_501)).astype(dtype)
    everything = np.concatenate([tame, wild(np.random.default_rng(1), (SIZE, 701), dtype)], axis=1)
    want = [rounded(column, dtype) for column in everything.T] if SIZE > 1 else everything[0]
    for turn in range(SIZE):
        mine = everything[(RANK + turn) % SIZE]
        assert bits(nodes.reduce("SUM", mine, axis=None)) == bits(np.array(want))
    with np.errstate(over="ignore"):
        assert bits(nodes.reduce("MEAN", mine, axis=None)) == bits(want / dtype.type(SIZE))
    swapped = nodes.reduce("SUM", [mine.astype(dtype.newbyteorder(">")), mine[:5], mine[::2]], axis=None)
    assert [bits(each) for each in swapped] == [bits(np.array(want)[which]) for which in np.s_[:, :5, ::2]]


def test_elementwise_of_other_dtypes(nodes):
    random = np.random.default_rng(2)
    for dtype in ("c8", "c16", "f2", BFLOAT16, "i4", "i1", "u8"):
        dtype = np.dtype(dtype)
        everything = random.normal(size=(2, SIZE, 901)) * 9
        if dtype.kind == "c":
            everything = (everything[0] + 1j * everything[1]).astype(dtype)
            part = everything.real.dtype
            want = [complex(rounded(column.real, part), rounded(column.imag, part)) for column in everything.T]
        elif dtype.kind in "iu":
            everything = np.abs(everything[0]).astype(dtype)
            want = everything.sum(0)
        else:
            everything = everything[0].astype(dtype)
            want = [rounded(column, np.dtype("f4")) for column in everything.T]
        assert bits(nodes.reduce("SUM", everything[RANK], axis=None)) == bits(np.array(want).astype(dtype))


def test_extremes_and_products(nodes):
    ops = CollectiveAllReduce("exact").bound_to(nodes.extended.engine.topology)
    zeros = np.array([0.0, -0.0]) * (-1) ** RANK
    for op in ("MAX", "MIN") if SIZE > 1 else ():
        assert bits(ops.reduce(op, zeros, zeros).values[0]) == bits(np.zeros(2))
        nan = np.float64(-np.nan if RANK else 3)
        assert bits(ops.reduce(op, nan, nan).values[0]) == bits(np.float64(np.nan))
        assert ops.reduce(op, float(RANK), zeros).values[0] == (SIZE - 1) * (op == "MAX")
    assert ops.reduce("PROD", np.int64(2), zeros).values[0] == 2**SIZE
    if SIZE > 1:
        with pytest.raises(ValueError, match="PROD of floating point"):
            ops.reduce("PROD", 2.0, zeros)
        assert ops.reduce("PROD", np.int64(2), zeros).values[0] == 2**SIZE  # all have raised it: they go on
    assert nodes.reduce("SUM", 1.0, axis=None) == SIZE


def share(examples, turn):
    """This replica's of some examples, dealt out in a different way each time."""
    if turn == 0:
        return examples[RANK::SIZE]
    if turn == 1:
        return examples if RANK == SIZE - 1 else examples[:0]
    edge = len(examples) // (SIZE + 1)
    return examples[::-1][RANK * edge : (RANK + 1) * edge if RANK < SIZE - 1 else None]


def portable(seed, shape):
    """Values over 40 powers of two, the same on every machine."""
    random = np.random.default_rng(seed)
    return np.ldexp(random.integers(-(2**52), 2**52, shape), random.integers(-78, -38, shape))


# Of every number of ranks, layout of nodes and MPI library.
DIGESTS = {
    "float32": "6481251803b588ad",
    "float64": "b1f5157b4fdddb1a",
    "complex64": "202573b5d88239f8",
    "complex128": "bd0b07ee029ccdfa",
    "float16": "4b82660cf8ce7faa",
    "bfloat16": "6265874c4840c2cd",
    "metrics": "bf39faa5a6946b66",
}


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16", "f2", BFLOAT16], ids=str)
def test_an_axis_of_examples(nodes, dtype):
    dtype = np.dtype(dtype)
    examples = portable(3, (301, 2, 7)).astype(dtype)
    if dtype.kind == "c":
        examples.imag = portable(4, (301, 2, 7))
    for turn in range(3):
        mine = share(examples, turn)
        got = [
            nodes.reduce("SUM", mine, axis=0),
            nodes.reduce("MEAN", mine, axis=(0, 2)),
            nodes.reduce("MEAN", np.moveaxis(mine, 0, 1), axis=-2 if turn else 1),
            nodes.reduce("SUM", mine, axis=(0, 1, 2)),
        ]
        assert [each.dtype for each in got] == [dtype] * 4
        digest = hashlib.sha256(b"".join(map(bits, got))).hexdigest()[:16]
        assert digest == DIGESTS[dtype.name]
    if dtype in (np.float32, np.float64):
        want = [rounded(column, dtype) for column in examples.reshape(301, -1).T]
        assert bits(got[0]) == bits(np.array(want))


def test_many_examples_in_blocks(exactly, monkeypatch):
    monkeypatch.setattr(axis_reduction, "_BLOCK", 100)
    monkeypatch.setattr(axis_reduction, "_OUTPUTS", 30)
    for dtype in (np.dtype("f4"), np.dtype("f8")):
        for shape in ((301, 1), (301, 70), (0, 3), (5, 0)):
            examples = wild(np.random.default_rng(4), shape, dtype)
            want = np.array([rounded(column, dtype) for column in examples.T], dtype)
            for turn in range(3):
                assert bits(exactly.reduce("SUM", share(examples, turn), axis=0)) == bits(want)
    assert np.isnan(exactly.reduce("MEAN", np.zeros(0), axis=0))


def test_mirrored_examples_and_integers(exactly):
    values = np.array([0.1, 0.2, 0.3, 1e20, -1e20])
    assert exactly.reduce("MEAN", mpistrat.values.Mirrored((values,)), axis=0) == math.fsum(values) / 5
    assert exactly.reduce("MEAN", np.array([1, 2, 6]), axis=0) == 3
    assert exactly.reduce("SUM", np.arange(4, dtype=np.int8), axis=0) == 6 * SIZE


def test_wrong_arguments_raise_everywhere(exactly):
    with pytest.raises(ValueError, match="axis"):
        exactly.reduce("SUM", np.ones(3), axis=1)
    with pytest.raises(ValueError, match="axis"):
        exactly.reduce("SUM", 1.0, axis=0)
    with pytest.raises(TypeError, match="no exact sum"):
        exactly.reduce("SUM", np.ones(3, np.longdouble), axis=0)
    if SIZE > 1:
        with pytest.raises(ValueError, match="do not fit together"):
            exactly.reduce("SUM", np.ones((3, 2 + (RANK == 0))), axis=0)


floats = {
    4: st.floats(width=32) | st.floats(-1e3, 1e3, width=32),
    8: st.floats() | st.floats(-1e3, 1e3) | st.sampled_from([1e308, -1e308, 5e-324, 1.0, 2.0**-53]),
}


@pytest.mark.full
@settings(max_examples=25)
@given(data=st.data(), width=st.sampled_from([4, 8]))
def test_any_floats_in_any_grouping(data, width):
    strategy = mpistrat.MultiWorkerMirroredStrategy(communication_options=EXACT)
    dtype = np.dtype(f"f{width}")
    examples = np.array(data.draw(st.lists(floats[width], min_size=1, max_size=12)), dtype)
    want = bits(rounded(examples, dtype))
    for turn in range(3):
        assert bits(strategy.reduce("SUM", share(examples, turn), axis=0)) == want
    with strategy.scope():
        total = metrics.Sum()
    for part in np.array_split(share(examples.astype(np.float64), 2), 3):
        strategy.run(lambda part=part: total.update_state(part))
    assert bits(total.result()) == bits(rounded(examples, np.dtype("f8")))


def test_metrics(exactly):
    examples = portable(5, (211, 3))
    for turn in range(3):
        with exactly.scope():
            mean, error = metrics.Mean(), metrics.MeanSquaredError()
        mine = share(examples, turn)
        for start in range(0, 211, 40 + turn):
            part = mine[start : start + 40 + turn]
            exactly.run(mean.update_state, (part, part[:, 0] ** 2))
            exactly.run(error.update_state, (part[:, 0], part[:, 1]))
        digest = hashlib.sha256(bits(mean.result()) + bits(error.result())).hexdigest()[:16]
        assert digest == DIGESTS["metrics"]
        saved = [variable.read_value() for variable in mean.variables]
        before = mean.result()
        mean.reset_state()
        assert mean.result() == 0
        for variable, value in zip(mean.variables, saved, strict=True):  # as `load` does
            variable.assign(value)
        assert bits(mean.result()) == bits(before)
        exactly.run(mean.update_state, (mine, mine[:, 0] ** 2))
        np.testing.assert_allclose(mean.result(), before, rtol=1e-15)
    mine = exactly.run(mean.result)  # of this replica
    assert (mine == before) == (SIZE == 1)
    if SIZE > 1:
        with exactly.scope(), pytest.raises(ValueError, match="once per replica"):
            mean.update_state(1.0)
