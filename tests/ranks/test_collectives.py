"""What the collectives of a strategy accept, refuse, and do with the ops they are given."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.collectives import (
    CollectiveAllReduce,
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
    packing,
)
from mpistrat.collectives.hierarchical_copy import HierarchicalCopy
from mpistrat.collectives.identity import Identity
from mpistrat.runtime.operation import MismatchError, ValueMismatchError

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
SUM_OF_RANKS = SIZE * (SIZE - 1) // 2


@pytest.fixture
def in_step(strategy):
    """After the test, in which something may have been refused, the replicas still understand each other."""
    yield
    assert strategy.reduce("SUM", 1, axis=None) == SIZE


def all_reduce(strategy, op, value, options=None):
    return strategy.run(lambda: mpistrat.get_replica_context().all_reduce(op, value, options))


def ways(strategy, op, value):
    """Every way to reduce one value."""
    yield lambda: strategy.reduce(op, value, axis=None)
    yield lambda: all_reduce(strategy, op, value)
    yield lambda: strategy.extended.reduce_to(op, value, "cpu:0").values[0]
    yield lambda: strategy.extended.batch_reduce_to(op, [(value, "cpu:0")])[0].values[0]


# --- values that are no numbers ------------------------------------------------------------------------


NO_NUMBERS = {
    "bool": True,
    "bools": np.array([True, False]),
    "string": "abc",
    "strings": np.array(["a", "b"]),
    "bytes": b"abc",
    "objects": np.array([None, 1.5]),
    "dates": np.array(["2024-01-01"], "M8[D]"),
    "durations": np.array([3], "m8[s]"),
    "records": np.zeros(2, "i4,f8"),
    "void": np.zeros(2, "V4"),
    "set": {1, 2},
    "huge integer": 1 << 100,
    "float8": np.ones(3, ml_dtypes.float8_e5m2),
    "other float8": np.ones(3, ml_dtypes.float8_e4m3fn),
    "int4": np.ones(3, ml_dtypes.int4),
    "masked": np.ma.masked_array([1.0, 2.0], [True, False]),
    "function": len,
}


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("name", NO_NUMBERS)
def test_no_number(strategy, in_step, op, name):
    for way in ways(strategy, op, NO_NUMBERS[name]):
        with pytest.raises(TypeError):
            way()
    with pytest.raises(TypeError):
        strategy.reduce(op, NO_NUMBERS[name], axis=0)
    for with_ops in (mpistrat.ReductionToOneDevice(), mpistrat.HierarchicalCopyAllReduce()):
        other = mpistrat.MirroredStrategy(cross_device_ops=with_ops)
        with pytest.raises(TypeError):
            other.reduce(op, NO_NUMBERS[name], axis=None)


def test_one_bad_leaf_stops_all(strategy, in_step):
    with pytest.raises(TypeError, match="bool"):
        strategy.reduce("SUM", {"a": np.ones(3), "b": [np.ones(3, bool)]}, axis=None)


def test_unknown_op(strategy, in_step):
    for way in (*ways(strategy, "MAX", 1.0), lambda: strategy.reduce("", 1.0, axis=None)):
        with pytest.raises(ValueError, match="SUM"):
            way()
    for op in (None, 1, max):
        for way in ways(strategy, op, 1.0):
            with pytest.raises(TypeError):
                way()


def test_op_by_other_names(strategy):
    aggregation = mpistrat.VariableAggregation
    for op in ("sum", "Sum", mpistrat.ReduceOp.SUM, aggregation.SUM):
        for way in ways(strategy, op, 1.0):
            assert way() == SIZE
    for op in (aggregation.NONE, aggregation.ONLY_FIRST_REPLICA):
        for way in ways(strategy, op, 1.0):
            with pytest.raises(ValueError):
                way()


# --- the precision -------------------------------------------------------------------------------------


HALVES = [np.float16, ml_dtypes.bfloat16]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("length", [1, 5, 40_000, 300_001])
@pytest.mark.parametrize("with_ops", [CollectiveAllReduce, mpistrat.ReductionToOneDevice])
def test_halves_are_added_in_float32_and_rounded_once(dtype, length, with_ops):
    """A half that is as large as its precision reaches does not change by 1, but by 1 + 1 + 1."""
    strategy = mpistrat.MirroredStrategy(cross_device_ops=with_ops())
    large = 2048 if dtype is np.float16 else 256
    value = np.full(length, large if RANK == 0 else 1, dtype)
    exact = np.float32(large + SIZE - 1)
    for got, wanted in (
        (strategy.reduce("SUM", value, axis=None), exact),
        (strategy.reduce("MEAN", value, axis=None), exact / np.float32(SIZE)),
        (strategy.reduce("SUM", [value, value], axis=None)[1], exact),
    ):
        assert got.dtype == dtype
        assert set(got.tolist()) == {float(np.asarray(wanted).astype(dtype))}


def test_mean_of_halves_does_not_overflow(strategy):
    largest = np.finfo(np.float16).max
    value = np.full(3, largest, np.float16)
    assert (strategy.reduce("MEAN", value, axis=None) == largest).all()
    assert strategy.reduce("MEAN", value, axis=0) == largest


def test_infinities_over_an_axis_are_values_whatever_the_settings(strategy):
    """As without an axis: a rank that raised alone would leave the others waiting."""
    with np.errstate(all="raise"):
        large = np.full(5, 60000, np.float16)
        assert strategy.reduce("SUM", large, axis=0) == np.inf
        assert strategy.reduce("SUM", large[0], axis=None) == (np.inf if SIZE > 1 else 60000)
        own = np.array([np.inf, -np.inf]) if RANK == 0 else np.ones(2)
        for op in ("SUM", "MEAN"):
            assert np.isnan(strategy.reduce(op, own, axis=0))
        assert strategy.reduce("SUM", np.full(2, 1.7e308), axis=(0,)) == np.inf
        assert np.isnan(strategy.reduce("MEAN", np.ones(0), axis=0))


@pytest.mark.parametrize("dtype", HALVES)
def test_axis_of_halves_is_added_in_float32(strategy, dtype):
    value = np.ones(3000, dtype)
    assert strategy.reduce("SUM", value, axis=0) == np.float32(3000 * SIZE).astype(dtype)
    assert strategy.reduce("MEAN", value, axis=0) == 1


SMALL_INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
ALL_OPS = {
    "default": CollectiveAllReduce,
    "hierarchical": mpistrat.HierarchicalCopyAllReduce,
    "one device": mpistrat.ReductionToOneDevice,
}


@pytest.mark.parametrize("name", SMALL_INTEGERS)
@pytest.mark.parametrize("length", [1, 19, 70_001])
@pytest.mark.parametrize("with_ops", ALL_OPS)
def test_sum_of_integers_wraps_around_at_every_place(name, length, with_ops):
    """Open MPI adds some of the elements with saturation and others without, by the processor."""
    strategy = mpistrat.MirroredStrategy(cross_device_ops=ALL_OPS[with_ops]())
    dtype = np.dtype(name)
    value = np.full(length, np.iinfo(dtype).max - 1, dtype)
    got = strategy.reduce("SUM", value, axis=None)
    assert got.dtype == dtype
    wanted = np.zeros(length, dtype)
    for _ in range(SIZE):
        wanted += value
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", SMALL_INTEGERS)
@pytest.mark.parametrize("length", [1, 19, 70_001])
@pytest.mark.parametrize("with_ops", ALL_OPS)
def test_mean_of_integers_does_not_overflow(name, length, with_ops):
    strategy = mpistrat.MirroredStrategy(cross_device_ops=ALL_OPS[with_ops]())
    largest = np.iinfo(name).max
    value = np.full(length, largest, name)
    for got in (
        strategy.reduce("MEAN", value, axis=None),
        strategy.reduce("MEAN", [value, value], axis=None)[0],
        strategy.reduce("MEAN", value, axis=0),
    ):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, float(largest), rtol=1e-12)


def test_sum_over_an_axis_widens_as_numpy_does(strategy):
    for name in SMALL_INTEGERS:
        got = strategy.reduce("SUM", np.full(9, 100, name), axis=0)
        assert got == 900 * SIZE
        assert got.dtype == np.sum(np.ones(1, name)).dtype


def test_long_double(strategy):
    value = np.array([1, 1 + np.finfo(np.longdouble).eps], np.longdouble)
    np.testing.assert_array_equal(strategy.reduce("SUM", value, axis=None), value * SIZE)
    np.testing.assert_array_equal(strategy.reduce("MEAN", value, axis=None), value)


def test_not_a_number_and_infinity(strategy):
    value = np.array([np.nan if RANK == SIZE - 1 else 1.0, np.inf, -np.inf if RANK else np.inf, -0.0])
    got = strategy.reduce("SUM", value, axis=None)
    assert np.isnan(got[0])
    assert got[1] == np.inf
    assert np.isnan(got[2]) if SIZE > 1 else got[2] == np.inf
    assert np.signbit(got[3])


# --- kinds of results ----------------------------------------------------------------------------------


def test_kinds_of_results(strategy):
    for value, kind in [
        (1, np.int64),
        (1.5, np.float64),
        (1j, np.complex128),
        (np.float32(1), np.float32),
        (np.array(1.0), np.ndarray),
        (np.ones(2), np.ndarray),
    ]:
        for op in ("SUM", "MEAN"):
            for way in ways(strategy, op, value):
                got = way()
                if not (op == "MEAN" and kind is np.int64):
                    assert isinstance(got, kind), (value, op, type(got))
                assert np.shape(got) == np.shape(value)


def test_values_of_the_library(strategy):
    mirrored, per_replica = mpistrat.Mirrored((np.full(2, 4.0),)), mpistrat.PerReplica((RANK,))
    np.testing.assert_array_equal(strategy.reduce("MEAN", mirrored, axis=None), [4, 4])
    assert strategy.reduce("MEAN", mirrored, axis=0) == 4
    assert strategy.reduce("SUM", per_replica, axis=None) == SUM_OF_RANKS
    for way in ways(strategy, "SUM", mirrored):
        with pytest.raises(ValueError, match="SUM of a mirrored"):
            way()
    for axis in (None, 0):
        with pytest.raises(ValueError, match="SUM of a mirrored"):
            strategy.reduce("SUM", mirrored, axis=axis)
    with pytest.raises(ValueError, match="SUM of a mirrored"):
        strategy.reduce("SUM", [per_replica, mirrored], axis=None)
    got = strategy.reduce("MEAN", {"a": mirrored, "b": per_replica, "c": None, "d": mirrored}, axis=None)
    np.testing.assert_array_equal(got["a"], [4, 4])
    assert got["b"] == SUM_OF_RANKS / SIZE
    assert got["c"] is None
    pairs = [(mirrored, "cpu:0"), (RANK, "cpu:0"), (mirrored, mirrored), (np.ones(3), per_replica)]
    reduced = strategy.extended.batch_reduce_to("MEAN", pairs)
    assert [type(each) for each in reduced] == [mpistrat.Mirrored] * 4
    assert float(reduced[1]) == SUM_OF_RANKS / SIZE
    np.testing.assert_array_equal(reduced[2], [4, 4])


def test_sum_of_a_mirrored_variable_is_refused_as_that_of_a_mirrored_value(strategy):
    with strategy.scope():
        v = mpistrat.Variable([1.0, 2.0])
        np.testing.assert_array_equal(strategy.reduce("MEAN", v, axis=None), [1, 2])
        with pytest.raises(ValueError):
            strategy.reduce("SUM", v, axis=None)


def test_empty_structures(strategy):
    for value in ([], {}, (), None, [None, {}], {"a": []}):
        assert strategy.reduce("SUM", value, axis=None) == value
        assert all_reduce(strategy, "SUM", value) == value


def test_order_of_dicts(strategy):
    """Equal keys are matched whatever the order in which a rank wrote them, and come back in that order."""
    keys = list("bca") if RANK % 2 else list("abc")
    got = strategy.reduce("SUM", {key: float(ord(key)) for key in keys}, axis=None)
    assert list(got) == keys
    assert got == {key: float(ord(key)) * SIZE for key in keys}


def test_namedtuples_and_many_leaves(strategy):
    from collections import OrderedDict, namedtuple

    Point = namedtuple("Point", "x y")
    got = strategy.reduce("SUM", OrderedDict(b=Point(1, [2.0]), a=(3,)), axis=None)
    assert isinstance(got, OrderedDict)
    assert got == OrderedDict(b=Point(SIZE, [2.0 * SIZE]), a=(3 * SIZE,))
    many = strategy.reduce("SUM", [np.full(i % 7, i) for i in range(3000)], axis=None)
    assert all((each == i * SIZE).all() for i, each in enumerate(many))


def test_results_own_their_values(strategy):
    """Neither a second call, nor writing into one result, changes another result or an argument."""
    given = [np.full(3, 1.0), np.full(20_000, 2.0), np.full(4, 3.0), np.float32([4])]
    results = [all_reduce(strategy, op, given) for op in ("SUM", "SUM", "MEAN")]
    arrays = [*itertools.chain(*results), *given]
    for i, array in enumerate(arrays):
        array[...] = -i
    for i, array in enumerate(arrays):
        assert (array == -i).all()


# --- structures of options -----------------------------------------------------------------------------


def test_options_everywhere():
    options = CommunicationOptions(bytes_per_pack=64, implementation="ring")
    strategy = mpistrat.MultiWorkerMirroredStrategy(communication_options=options)
    value = [np.arange(n, dtype=np.float32) for n in (100, 1, 50, 0)]
    with pytest.warns(DeprecationWarning, match="CommunicationOptions"):
        other = CollectiveHints(bytes_per_pack=8)
    for got in (
        all_reduce(strategy, "SUM", value),
        all_reduce(strategy, "SUM", value, other),
        [x.values[0] for x in strategy.extended.batch_reduce_to("SUM", [(x, x) for x in value], other)],
        [strategy.extended.reduce_to("SUM", x, x, experimental_hints=other).values[0] for x in value],
        [strategy.extended.reduce_to("SUM", x, x, options=other).values[0] for x in value],
    ):
        for one, array in zip(got, value, strict=True):
            np.testing.assert_array_equal(one, array * SIZE)


@pytest.mark.parametrize("wrong", [3, "ring", {"bytes_per_pack": 8}])
def test_options_that_are_none(wrong):
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    array, pair = np.ones(2), [(1.0, "cpu:0")]
    for call in (
        lambda: all_reduce(strategy, "SUM", array, wrong),
        lambda: all_reduce(strategy, "SUM", {"a": array}, wrong),
        lambda: strategy.run(lambda: mpistrat.get_replica_context().all_gather(array, 0, wrong)),
        lambda: strategy.extended.reduce_to("SUM", array, array, wrong),
        lambda: strategy.extended.batch_reduce_to("SUM", pair, experimental_hints=wrong),
    ):
        with pytest.raises(TypeError, match="options must be CommunicationOptions"):
            call()
    strategy.barrier()


def test_options_are_checked():
    with pytest.raises(ValueError, match="bytes_per_pack"):
        CommunicationOptions(bytes_per_pack=-1)
    for wrong in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            CommunicationOptions(timeout_seconds=wrong)
    for wrong in ("tcp", 3, None):
        with pytest.raises(ValueError):
            CommunicationOptions(implementation=wrong)
    assert CommunicationOptions(implementation="nccl").implementation is CommunicationImplementation.NCCL
    with pytest.raises(ValueError):
        mpistrat.MultiWorkerMirroredStrategy(communication_options={"bytes_per_pack": 3})
    merged = CommunicationOptions(8, 3.0, "ring").merge(CommunicationOptions(timeout_seconds=4))
    assert merged == CommunicationOptions(8, 4, "RING")
    assert merged.merge(None) == merged
    assert len({merged, CommunicationOptions(8, 4, "RING"), CommunicationOptions()}) == 2


def test_options_that_differ_between_ranks(strategy, in_step):
    if SIZE == 1:
        return
    with pytest.raises(ValueError, match=r"ranks? 0"):
        all_reduce(strategy, "SUM", [1.0, 2.0], CommunicationOptions(bytes_per_pack=8 * RANK))


# --- ops -----------------------------------------------------------------------------------------------


@pytest.fixture
def messages(monkeypatch):
    """The length of each message that `HierarchicalCopyAllReduce` sends, or would if there were other ranks."""
    lengths = []
    for kind in (HierarchicalCopy, Identity):

        def count(self, topology, combine, send, receive, original=kind.reduce):
            lengths.append(len(send))
            original(self, topology, combine, send, receive)

        monkeypatch.setattr(kind, "reduce", count)
    return lengths


@pytest.mark.parametrize(("num_packs", "most"), [(0, 9), (1, 1), (3, 3), (100, 9)])
def test_num_packs(messages, num_packs, most):
    strategy = mpistrat.MirroredStrategy(cross_device_ops=mpistrat.HierarchicalCopyAllReduce(num_packs))
    got = strategy.reduce("SUM", [np.full(10, i, np.float32) for i in range(9)], axis=None)
    assert [set(each) for each in got] == [{float(i * SIZE)} for i in range(9)]
    assert sum(messages) == 90
    assert len(messages) <= most
    if num_packs in (0, 1):
        assert len(messages) == most


@pytest.mark.parametrize("bytes_per_pack", [0, 1000, 1 << 20])
def test_large_arrays_go_alone_and_small_ones_together(messages, bytes_per_pack):
    """Unless larger packs are asked for."""
    options = CommunicationOptions(bytes_per_pack=bytes_per_pack, implementation="hierarchical_copy")
    strategy = mpistrat.MultiWorkerMirroredStrategy(communication_options=options)
    limit = packing.ALONE_BYTES // 4
    lengths = [3, limit, 5, limit - 1, 0, limit + 1]
    value = [np.full(n, i, np.float32) for i, n in enumerate(lengths)]
    got = strategy.reduce("SUM", value, axis=None)
    together = {
        0: [limit, limit + 1, limit + 7],
        1000: [limit, limit + 1, limit - 1, 8],
        1 << 20: [3 * limit + 8],
    }
    assert sorted(messages) == sorted(together[bytes_per_pack])
    assert [each.tolist() for each in got] == [[float(i * SIZE)] * n for i, n in enumerate(lengths)]


def test_ops_are_checked():
    for kind in (mpistrat.HierarchicalCopyAllReduce, mpistrat.NcclAllReduce):
        with pytest.raises(ValueError, match="num_packs"):
            kind(num_packs=-1)
    with pytest.raises(RuntimeError, match=r"CuPy|GPU|NCCL"):
        mpistrat.NcclAllReduce()
    with pytest.raises(TypeError):
        mpistrat.ReductionToOneDevice(accumulation_fn="max")
    with pytest.raises(ValueError):
        mpistrat.ReductionToOneDevice(reduce_to_device="moon:0")
    for wrong in ("nccl", mpistrat.HierarchicalCopyAllReduce):
        with pytest.raises(TypeError):
            mpistrat.MirroredStrategy(cross_device_ops=wrong)


@pytest.mark.parametrize("kind", [*ALL_OPS.values(), mpistrat.CrossDeviceOps])
def test_unbound_ops(kind):
    ops = kind()
    for call in (
        lambda: ops.reduce("SUM", 1.0, "cpu:0"),
        lambda: ops.batch_reduce("SUM", [(1.0, "cpu:0")]),
        lambda: ops.broadcast(1.0, "cpu:0"),
    ):
        with pytest.raises((RuntimeError, NotImplementedError), match=kind.__name__) as caught:
            call()
        if kind is not mpistrat.CrossDeviceOps:
            assert not isinstance(caught.value, NotImplementedError)


@pytest.mark.parametrize("kind", ALL_OPS.values())
def test_ops_by_themselves_once_bound(kind):
    ops = kind()
    mpistrat.MirroredStrategy(cross_device_ops=ops)
    assert float(ops.reduce("SUM", float(RANK), "cpu:0")) == SUM_OF_RANKS
    pairs = [(mpistrat.PerReplica((np.full(2, RANK),)), "cpu:0"), (1.0, "cpu:0")]
    first, second = ops.batch_reduce(mpistrat.ReduceOp.SUM, pairs)
    np.testing.assert_array_equal(first, [SUM_OF_RANKS] * 2)
    assert float(second) == SIZE
    assert float(ops.broadcast(float(RANK + 7), "cpu:0")) == 7
    assert ops.batch_reduce("SUM", []) == []
    for pairs in ([1.0], [(1.0, "cpu:0", 3)], [(1.0,)]):
        with pytest.raises(ValueError, match="pair"):
            ops.batch_reduce("SUM", pairs)


@pytest.mark.parametrize("kind", ALL_OPS.values())
def test_ops_of_two_strategies_on_different_ranks(kind):
    """Either each strategy reduces over its own ranks, or the second is refused: never over the wrong ones."""
    ops = kind()
    mine = mpistrat.MirroredStrategy(cross_device_ops=ops)
    try:
        alone = mpistrat.MirroredStrategy(cross_device_ops=ops, comm=MPI.COMM_SELF)
    except (ValueError, RuntimeError):
        alone = None
    assert mine.reduce("SUM", 1.0, axis=None) == SIZE
    if alone is not None:
        assert alone.reduce("SUM", 1.0, axis=None) == 1
        assert mine.reduce("SUM", 1.0, axis=None) == SIZE


def test_ops_of_two_strategies_on_the_same_ranks():
    ops = mpistrat.HierarchicalCopyAllReduce()
    for _ in range(2):
        assert mpistrat.MirroredStrategy(cross_device_ops=ops).reduce("SUM", 1.0, axis=None) == SIZE


def test_destinations(strategy, in_step):
    with strategy.scope():
        v = mpistrat.Variable(1.0)
    extended = strategy.extended
    for destination in ("cpu:0", "/cpu:0", "/gpu:1", v, np.ones(1), mpistrat.PerReplica((1,)), 3.0):
        assert float(extended.reduce_to("SUM", 1.0, destination)) == SIZE
        assert float(extended.batch_reduce_to("SUM", [(1.0, destination)])[0]) == SIZE
        assert float(extended.broadcast_to(float(RANK), destination)) == 0
    for wrong, error in [
        ("", ValueError),
        ("moon", ValueError),
        (None, TypeError),
        ([], TypeError),
        ((v,), TypeError),
        ({"cpu:0"}, TypeError),
        (object(), TypeError),
    ]:
        for call in (
            lambda wrong=wrong: extended.reduce_to("SUM", 1.0, wrong),
            lambda wrong=wrong: extended.batch_reduce_to("SUM", [(1.0, "cpu:0"), (1.0, wrong)]),
            lambda wrong=wrong: extended.broadcast_to(1.0, wrong),
        ):
            with pytest.raises(error):
                call()


def test_accumulation_fn():
    seen = []

    def largest(values):
        seen.append([np.asarray(each).tolist() for each in values])
        return np.max(values, axis=0)

    strategy = mpistrat.MirroredStrategy(cross_device_ops=mpistrat.ReductionToOneDevice("cpu:0", largest))
    mine = np.array([RANK, -RANK], np.float32)
    for way in ways(strategy, "SUM", mine):
        got = way()
        np.testing.assert_array_equal(got, [SIZE - 1, 0])
        assert got.dtype == np.float32
    assert float(strategy.reduce("MEAN", float(RANK), axis=None)) == (SIZE - 1) / SIZE
    if RANK == 0:
        assert seen[0] == [[rank, -rank] for rank in range(SIZE)]
    else:
        assert seen == []


def test_accumulation_fn_that_changes_its_arguments_or_shape():
    def take_over(values):
        values[0] *= 100
        return values[0].sum(keepdims=True)

    ops = mpistrat.ReductionToOneDevice(accumulation_fn=take_over)
    strategy = mpistrat.MirroredStrategy(cross_device_ops=ops)
    mine = np.ones(3)
    np.testing.assert_array_equal(strategy.reduce("SUM", mine, axis=None), [300])
    np.testing.assert_array_equal(mine, 1)


@pytest.mark.parametrize("result", ["error", "nothing"])
def test_accumulation_fn_that_fails(in_step, result):
    def fail(values):
        if result == "error":
            raise KeyError("no such thing")

    strategy = mpistrat.MirroredStrategy(cross_device_ops=mpistrat.ReductionToOneDevice(accumulation_fn=fail))
    for op in ("SUM", "MEAN"):
        with pytest.raises((KeyError, RuntimeError) if result == "error" else TypeError) as caught:
            strategy.reduce(op, 1.0, axis=None)
        if result == "error":
            assert "no such thing" in str(caught.value)
    assert strategy.agree(True)


class Recorded(mpistrat.CrossDeviceOps):
    """Ops with hooks only, which ask MPI themselves."""

    def __init__(self, as_mirrored):
        self.calls, self.as_mirrored = [], as_mirrored

    def _sum(self, op, value):
        assert isinstance(op, mpistrat.ReduceOp)
        assert isinstance(value, mpistrat.PerReplica)
        total = MPI.COMM_WORLD.allreduce(np.asarray(value.values[0]))
        total = total / SIZE if op is mpistrat.ReduceOp.MEAN else total
        return mpistrat.Mirrored((total,)) if self.as_mirrored else total

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        self.calls.append("reduce")
        assert isinstance(options, CommunicationOptions)
        return self._sum(reduce_op, per_replica_value)

    def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        self.calls.append("batch_reduce")
        return [self._sum(reduce_op, value) for value, _ in value_destination_pairs]

    def broadcast_implementation(self, tensor, destinations):
        self.calls.append("broadcast")
        return MPI.COMM_WORLD.bcast(tensor)


@pytest.mark.parametrize("as_mirrored", [True, False])
def test_own_ops(as_mirrored):
    ops = Recorded(as_mirrored)
    strategy = mpistrat.MirroredStrategy(cross_device_ops=ops)
    for way in ways(strategy, "SUM", np.full(2, float(RANK))):
        ops.calls.clear()
        np.testing.assert_array_equal(way(), [SUM_OF_RANKS] * 2)
        assert ops.calls[0].endswith("reduce")
    got = all_reduce(strategy, "MEAN", {"a": 1.0, "b": [np.ones(2)]})
    assert got["a"] == 1
    assert ops.calls == ["reduce", "batch_reduce"] or ops.calls[-1] == "batch_reduce"
    with strategy.scope():
        v = mpistrat.Variable(0.0, aggregation=mpistrat.VariableAggregation.SUM)
    ops.calls.clear()
    strategy.run(lambda: v.assign_add(1.0))
    assert float(v) == SIZE
    assert ops.calls
    ops.calls.clear()
    assert strategy.extended.broadcast_to(RANK, "cpu:0").values == (0,)
    assert ops.calls == ["broadcast"]
    assert strategy.reduce("MEAN", np.full(3, float(RANK)), axis=0) == SUM_OF_RANKS / SIZE


def test_ops_without_hooks():
    strategy = mpistrat.MirroredStrategy(cross_device_ops=mpistrat.CrossDeviceOps())
    for way in ways(strategy, "SUM", 1.0):
        with pytest.raises(NotImplementedError, match="CrossDeviceOps must override"):
            way()
    assert float(strategy.extended.broadcast_to(float(RANK), "cpu:0")) == 0


@pytest.mark.parametrize("kind", ALL_OPS.values())
def test_hooks_of_derived_ops_are_called_on_every_way(kind):
    calls = []

    class Derived(kind):
        def reduce_implementation(self, *args):
            calls.append("reduce")
            return super().reduce_implementation(*args)

        def batch_reduce_implementation(self, *args):
            calls.append("batch_reduce")
            return super().batch_reduce_implementation(*args)

    strategy = mpistrat.MirroredStrategy(cross_device_ops=Derived())
    for number, way in enumerate(ways(strategy, "SUM", 1.0)):
        calls.clear()
        assert way() == SIZE
        assert calls, f"way number {number} goes around the hooks"


# --- sparse rows ---------------------------------------------------------------------------------------


def rows_of(rank):
    """Rank 1 has no rows; indices repeat inside and across ranks."""
    n = 0 if rank == 1 else 3
    return mpistrat.IndexedSlices(np.full((n, 2), rank + 1.0), [0, 2, 2][:n], (4, 2))


@pytest.mark.parametrize("with_ops", ALL_OPS)
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_sparse_rows(with_ops, op):
    strategy = mpistrat.MirroredStrategy(cross_device_ops=ALL_OPS[with_ops]())
    mine = rows_of(RANK)
    wanted = sum(rows_of(rank).to_dense() for rank in range(SIZE)) / (SIZE if op == "MEAN" else 1)
    for way in ways(strategy, op, mine):
        got = way()
        assert isinstance(got, mpistrat.IndexedSlices)
        assert got.dense_shape == (4, 2)
        np.testing.assert_allclose(got.to_dense(), wanted)
    dense, sparse, number = all_reduce(strategy, op, [np.full(3, 1.0), mine, 1.0])
    np.testing.assert_allclose(sparse.to_dense(), wanted)
    assert (dense == number).all()
    np.testing.assert_array_equal(mine.to_dense(), rows_of(RANK).to_dense())


@pytest.mark.parametrize("name", ["int8", "int16", "int32", "float16", "uint8", "bfloat16"])
def test_mean_of_sparse_rows_has_the_precision_of_the_dense_one(strategy, name):
    dtype = np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name)
    dense = np.full((1, 1), 100, dtype)
    got = strategy.reduce("MEAN", mpistrat.IndexedSlices(dense, [0], (1, 1)), axis=None)
    assert got.dtype == strategy.reduce("MEAN", dense, axis=None).dtype
    each = 100 / SIZE if dtype.kind in "iu" else float(np.float32(100 / SIZE).astype(dtype))
    np.testing.assert_allclose(np.asarray(got.values, np.float64), each, rtol=1e-12)


def test_sparse_rows_that_do_not_fit(strategy, in_step):
    with pytest.raises(TypeError, match="bool"):
        strategy.reduce("SUM", mpistrat.IndexedSlices(np.ones((1, 2), bool), [0]), axis=None)
    with pytest.raises(NotImplementedError):
        strategy.gather(rows_of(RANK), 0)
    with pytest.raises(NotImplementedError):
        strategy.run(lambda: mpistrat.get_replica_context().all_gather([rows_of(RANK)], 0))
    with pytest.raises(TypeError):
        strategy.reduce("SUM", rows_of(RANK), axis=0)
    with pytest.raises(TypeError):
        strategy.extended.broadcast_to(rows_of(RANK), "cpu:0")
    if SIZE > 1:
        for wrong in (
            mpistrat.IndexedSlices(np.ones((1, 2 + RANK)), [0]),
            mpistrat.IndexedSlices(np.ones((1, 2)), [0], (4 + RANK, 2)),
            mpistrat.IndexedSlices(np.ones((1, 2), [np.float32, float][RANK % 2]), [0]),
        ):
            with pytest.raises(ValueError, match=r"ranks? [\d, -]*1"):
                strategy.reduce("SUM", wrong, axis=None)


# --- axes ----------------------------------------------------------------------------------------------


def test_mean_over_examples_not_over_replicas(strategy):
    value = np.arange(RANK + 1, dtype=float)  # rank r has r + 1 examples
    every = np.concatenate([np.arange(rank + 1) for rank in range(SIZE)])
    assert strategy.reduce("MEAN", value, axis=0) == pytest.approx(every.mean())
    assert strategy.reduce("MEAN", np.array([1.0, 2, 3] if RANK == 0 else [5.0] * (RANK == 1)), axis=0) == (
        2.75 if SIZE > 1 else 2
    )


def test_replica_without_examples(strategy):
    value = np.full((0 if RANK == SIZE - 1 else 2, 3), 4.0)
    got = strategy.reduce("MEAN", value, axis=0)
    if SIZE == 1:
        assert np.isnan(got).all()
    else:
        np.testing.assert_array_equal(got, [4, 4, 4])
    np.testing.assert_array_equal(strategy.reduce("SUM", value, axis=0), [8.0 * (SIZE - 1)] * 3)
    assert np.isnan(strategy.reduce("MEAN", np.ones(0), axis=0))
    assert np.isnan(strategy.reduce("MEAN", np.ones(0, int), axis=0))
    assert strategy.reduce("SUM", np.ones(0), axis=0) == 0


def test_axes_that_are_wrong(strategy, in_step):
    value = np.ones((2, 3))
    for op in ("SUM", "MEAN"):
        for axis in ([0], [0, 1], 0.5, "0", (0.0,), {0}):
            with pytest.raises(TypeError):
                strategy.reduce(op, value, axis=axis)
        for axis in (2, -3, (0, 2), (0, 0), (0, -2)):
            with pytest.raises(ValueError):
                strategy.reduce(op, value, axis=axis)
        with pytest.raises(ValueError):
            strategy.reduce(op, 1.0, axis=0)
        for nested in ([value, value], {"a": value}, (value,), None):
            with pytest.raises(TypeError, match="structure"):
                strategy.reduce(op, nested, axis=0)


def test_axis_of_distributed_values(strategy):
    value = mpistrat.PerReplica((np.full(RANK + 1, 2),))
    assert strategy.reduce("MEAN", value, axis=0) == 2
    assert strategy.reduce("SUM", value, axis=0) == 2 * (SUM_OF_RANKS + SIZE)
    assert strategy.reduce("MEAN", value, axis=0).dtype == np.float64


# --- gathering -----------------------------------------------------------------------------------------


def test_gather_structures(strategy):
    value = {"a": np.full(RANK, RANK), "b": [np.full((1, 2), "x"), None]}
    wanted = [rank for rank in range(SIZE) for _ in range(rank)]
    for got in (
        strategy.gather(value, 0),
        strategy.run(lambda: mpistrat.get_replica_context().all_gather(value, axis=0)),
    ):
        assert got["a"].tolist() == wanted
        assert got["b"][0].tolist() == [["x", "x"]] * SIZE
        assert got["b"][1] is None
    assert strategy.gather(mpistrat.PerReplica((np.array([RANK]),)), 0).tolist() == list(range(SIZE))


def test_gather_what_cannot_be(strategy, in_step):
    for value, axis, error in [
        (1.0, 0, ValueError),
        (np.array(1.0), 0, ValueError),
        (np.ones(2), 1, ValueError),
        (np.ones(2), -2, ValueError),
        (np.ones(2), 0.0, TypeError),
        (np.ones(2), None, TypeError),
        (np.ones(2), (0,), TypeError),
        (np.array([None]), 0, TypeError),
    ]:
        with pytest.raises(error):
            strategy.gather(value, axis)
        with pytest.raises(error):
            strategy.run(
                lambda value=value, axis=axis: mpistrat.get_replica_context().all_gather(value, axis)
            )


@pytest.mark.ranks(min=2)
def test_gather_of_shapes_that_do_not_fit(strategy, in_step):
    for value, axis in [
        (np.ones((2, 2 + RANK)), 0),
        (np.ones((2 + RANK, 2)), 1),
        (np.ones((2,) * (1 + RANK % 2)), 0),
        (np.ones(2, [np.float32, np.float64][RANK % 2]), 0),
        (np.ones((2, 2)), RANK % 2),
    ]:
        with pytest.raises(ValueError, match=r"ranks? [\d, -]*1"):
            strategy.gather(value, axis)


# --- ranks that disagree -------------------------------------------------------------------------------


def named(error):
    """Every rank is named, with what it did and where."""
    text = str(error)
    assert f"rank {RANK}:" in text
    assert text.count(__file__) >= 1
    ranks = text.split("\n", 1)[1]
    for rank in range(SIZE):
        assert str(rank) in ranks or "-" in ranks
    return True


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    "value",
    [
        lambda: np.ones(3 + RANK),
        lambda: np.ones((3, 1)[RANK % 2 :]),
        lambda: np.ones(3, ["f4", "f8"][RANK % 2]),
        lambda: np.ones(3, ["i8", "f8"][RANK % 2]),
        lambda: [np.ones(3)] * (1 + RANK),
        lambda: {"ab"[RANK % 2]: 1.0, "c": np.ones(2 + RANK)},
        lambda: [1.0, None] if RANK == 0 else [1.0, 2.0],
        lambda: [np.ones(3), np.ones(2)][:: 1 - 2 * (RANK % 2)],
    ],
)
def test_different_values(strategy, in_step, value):
    for way in (
        ways(strategy, "SUM", value())
        if not isinstance(value(), (list, dict))
        else [
            lambda: strategy.reduce("SUM", value(), axis=None),
            lambda: all_reduce(strategy, "SUM", value()),
        ]
    ):
        with pytest.raises(ValueMismatchError) as caught:
            way()
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, MismatchError)
        assert named(caught.value)


@pytest.mark.ranks(min=2)
def test_dicts_with_different_keys(strategy, in_step):
    """Gradients of one key must not be added to those of another."""
    with pytest.raises(ValueError, match=r"ranks? [\d, -]*1"):
        strategy.reduce("SUM", {"ab"[RANK % 2]: 1.0}, axis=None)


@pytest.mark.ranks(min=2)
def test_different_ops(strategy, in_step):
    with pytest.raises(ValueMismatchError) as caught:
        strategy.reduce(["SUM", "MEAN"][RANK % 2], 1.0, axis=None)
    assert named(caught.value)
    assert "SUM" in str(caught.value)
    assert "MEAN" in str(caught.value)


CALLS = {
    "reduce": lambda strategy: strategy.reduce("SUM", 1.0, axis=None),
    "gather": lambda strategy: strategy.gather(np.ones(2), 0),
    "broadcast": lambda strategy: strategy.extended.broadcast_to(1.0, "cpu:0"),
    "barrier": lambda strategy: strategy.barrier(),
    "agree": lambda strategy: strategy.agree(True),
    "sparse": lambda strategy: strategy.reduce("SUM", rows_of(0), axis=None),
}


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(CALLS, 2)))
def test_different_collectives(strategy, in_step, one, other):
    for last in (SIZE - 1, 0):
        with pytest.raises(MismatchError) as caught:
            CALLS[one if last == RANK else other](strategy)
        assert named(caught.value)
        if {one, other} != {"reduce", "sparse"}:  # dense and sparse values of one reduction
            assert not isinstance(caught.value, ValueError)
            assert "different collectives" in str(caught.value)


@pytest.mark.ranks(min=2)
def test_different_strategies_on_the_same_ranks(strategy, in_step):
    """They share the ranks' one sequence: a mix-up is seen, not computed with."""
    other = mpistrat.MirroredStrategy()
    with pytest.raises(MismatchError):
        CALLS["barrier"](other) if RANK else CALLS["reduce"](strategy)


def test_after_an_error_all_goes_on(strategy):
    for _ in range(20):
        if SIZE > 1:
            with pytest.raises(ValueError):
                strategy.reduce("SUM", np.ones(1 + RANK), axis=None)
        assert strategy.reduce("SUM", 1, axis=None) == SIZE
        with pytest.raises(TypeError):
            strategy.reduce("SUM", True, axis=None)


# --- other array libraries -----------------------------------------------------------------------------


class Foreign:
    """As much of another library's array as the exchange of arrays needs."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __array_namespace__(self, api_version=None):
        return Namespace

    @property
    def device(self):
        return "cpu"


class Namespace:
    @staticmethod
    def asarray(array, device=None, **options):
        return Foreign(np.array(array))


@pytest.mark.filterwarnings("ignore")
def test_arrays_of_another_library(strategy):
    mine = Foreign(np.array([1.0, RANK]))
    got = all_reduce(strategy, "SUM", {"a": mine, "b": np.ones(2), "c": 1.0})
    assert isinstance(got["a"], Foreign)
    assert got["a"].array.tolist() == [SIZE, SUM_OF_RANKS]
    assert isinstance(got["b"], np.ndarray)
    assert strategy.gather(mine, 0).array.tolist() == [x for rank in range(SIZE) for x in (1.0, rank)]
    assert strategy.reduce("MEAN", mine, axis=0).array.tolist() == (SIZE + SUM_OF_RANKS) / (2 * SIZE)
    assert mine.array.tolist() == [1, RANK]
