"""Cross-device ops: packs, destinations, one strategy each, and ops of the user."""

import numpy as np
import pytest
from every_way import ALL_OPS, SUM_OF_RANKS, all_reduce, ways
from mpi4py import MPI

import mpistrat
from mpistrat.collectives import CommunicationOptions
from mpistrat.collectives.algorithms.choose import Identity
from mpistrat.collectives.algorithms.mpi import HierarchicalCopy
from mpistrat.runtime.topology import Limits

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


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


@pytest.mark.ranks(min=2)  # one rank copies each array
@pytest.mark.parametrize(("num_packs", "most"), [(0, 9), (1, 1), (3, 3), (100, 9)])
def test_num_packs(messages, num_packs, most):
    strategy = mpistrat.MirroredStrategy(cross_device_ops=mpistrat.HierarchicalCopyAllReduce(num_packs))
    got = strategy.reduce("SUM", [np.full(10, i, np.float32) for i in range(9)], axis=None)
    assert [set(each) for each in got] == [{float(i * SIZE)} for i in range(9)]
    assert sum(messages) == 90
    assert len(messages) <= most
    if num_packs in (0, 1):
        assert len(messages) == most


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("bytes_per_pack", [0, 1000, 1 << 20])
def test_large_arrays_go_alone_and_small_ones_together(messages, bytes_per_pack):
    """Unless larger packs are asked for."""
    options = CommunicationOptions(bytes_per_pack=bytes_per_pack, implementation="hierarchical_copy")
    strategy = mpistrat.MultiWorkerMirroredStrategy(communication_options=options)
    limit = Limits().alone_bytes // 4
    lengths = [3, limit, 5, limit - 1, 0, limit + 1]
    value = [np.full(n, i, np.float32) for i, n in enumerate(lengths)]
    got = strategy.reduce("SUM", value, axis=None)
    together = {0: [limit, limit + 1, limit + 7], 1000: [limit, limit + 1, limit - 1, 8], 1 << 20: [3 * limit + 8]}
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


class Doubled(mpistrat.HierarchicalCopyAllReduce):
    """Ops of a user that do not call `__init__` of the base class."""

    def __init__(self):
        self.calls = 0

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        self.calls += 1
        return 2 * super().reduce_implementation(reduce_op, per_replica_value, destinations, options)


class Untouched(mpistrat.HierarchicalCopyAllReduce):
    """Ops of a user with neither hooks nor `__init__` of the base class."""

    def __init__(self):
        self.calls = 0


@pytest.mark.parametrize(("kind", "factor"), [(Doubled, 2), (Untouched, 1)])
def test_ops_that_do_not_call_the_base_class(kind, factor):
    ops = kind()
    strategy = mpistrat.MirroredStrategy(cross_device_ops=ops)
    for _ in range(2):
        got = strategy.reduce("SUM", np.full(3, RANK + 1.0), axis=None)
        assert got.tolist() == [factor * sum(range(1, SIZE + 1))] * 3
    assert ops.calls == (2 if kind is Doubled else 0)
