"""What the collectives of a strategy accept, refuse, and return."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from every_way import SUM_OF_RANKS, all_reduce, ways
from mpi4py import MPI

import mpistrat
from mpistrat.collectives import CollectiveHints, CommunicationImplementation, CommunicationOptions

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


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
    for way in (*ways(strategy, "LARGEST", 1.0), lambda: strategy.reduce("", 1.0, axis=None)):
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
