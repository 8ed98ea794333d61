"""Signatures of writes, copies, references, reads of some rows, scattered writes: as tf.Variable has them."""

import copy
import inspect
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat import IndexedSlices, Variable
from mpistrat import VariableAggregation as Aggregation
from mpistrat import VariableSynchronization as Synchronization

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
SCATTERS = {
    "scatter_add": np.add,
    "scatter_sub": np.subtract,
    "scatter_mul": np.multiply,
    "scatter_div": np.true_divide,
    "scatter_min": np.minimum,
    "scatter_max": np.maximum,
    "scatter_update": None,
}


def make(strategy, value, **options):
    with strategy.scope():
        return Variable(value, **options)


# --- assign and its sisters ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
def test_assign_takes_what_tensorflow_takes(strategy, method):
    assert list(inspect.signature(getattr(Variable, method)).parameters)[2:] == ["use_locking", "name", "read_value"]
    for v in (make(strategy, 1.0), Variable(1.0)):
        write = getattr(v, method)
        for arguments, keywords in (
            ((2.0,), {}),
            ((2.0, False), {}),
            ((2.0, True, "name"), {}),
            ((2.0, False, None, True), {}),
            ((2.0,), {"use_locking": True, "name": "name", "read_value": True}),
        ):
            assert write(*arguments, **keywords) is v
        assert write(2.0, False, None, False) is None
        assert write(2.0, read_value=False) is None
        times = 7
        wanted = {"assign": 2.0, "assign_add": 1 + 2.0 * times, "assign_sub": 1 - 2.0 * times}[method]
        assert float(v) == wanted


@pytest.mark.parametrize("method", SCATTERS)
def test_scatters_take_what_tensorflow_takes(strategy, method):
    v = make(strategy, np.ones(3))
    rows = IndexedSlices([2.0], [1])
    write = getattr(v, method)
    assert write(rows) is write(rows, False) is write(rows, True, "name") is write(rows, name=None) is v


# --- scattered writes of replicas ----------------------------------------------------------------------


def rows_of(rank):
    """As each replica gives them: some rows in common, some its own."""
    return np.array([rank + 2.0, rank + 3.0]), np.array([rank % 5, 4])


@pytest.mark.parametrize("aggregation", [Aggregation.SUM, Aggregation.MEAN, Aggregation.ONLY_FIRST_REPLICA])
@pytest.mark.parametrize("method", SCATTERS)
def test_scatters_by_aggregation(strategy, method, aggregation):
    """The rows are reduced first, which keeps those of equal index apart, and then applied one by one."""
    v = make(strategy, np.arange(3.0, 8.0), aggregation=aggregation)
    write = lambda: getattr(v, method)(IndexedSlices(*rows_of(RANK), (5,)))  # noqa: E731
    reduced = aggregation is not Aggregation.ONLY_FIRST_REPLICA
    if reduced and method in ("scatter_min", "scatter_max", "scatter_update"):
        with pytest.raises(NotImplementedError, match="ONLY_FIRST_REPLICA"):
            strategy.run(write)
        return
    assert strategy.run(write) is v
    wanted = np.arange(3.0, 8.0)
    for rank in range(SIZE if reduced else 1):
        values, indices = rows_of(rank)
        if aggregation is Aggregation.MEAN:
            values = values / SIZE
        for value, index in zip(values, indices, strict=True):
            ufunc = SCATTERS[method]
            wanted[index] = value if ufunc is None else ufunc(wanted[index], value)
    np.testing.assert_allclose(v.numpy(), wanted, rtol=1e-13)
    for other in strategy.comm.allgather(v.numpy()):
        np.testing.assert_array_equal(other, v.numpy())


def test_scatters_without_an_aggregation(strategy):
    v = make(strategy, np.ones(3))
    for method in SCATTERS:
        with pytest.raises(ValueError, match="aggregation="):
            strategy.run(lambda method=method: getattr(v, method)(IndexedSlices([2.0], [1])))
    assert v.numpy().tolist() == [1, 1, 1]


@pytest.mark.skipif(SIZE != 2, reason="TensorFlow's answers are those of two replicas")
def test_scatters_as_recorded(strategy):
    """Replica i gives the row ``i + 2`` with index i."""
    divided = make(strategy, np.array([1, 6, 1], np.int32), aggregation=Aggregation.SUM)
    strategy.run(lambda: divided.scatter_div(IndexedSlices(np.array([RANK + 2], np.int32), [RANK])))
    assert divided.numpy().tolist() == [0, 2, 1]
    multiplied = make(strategy, np.array([2.0, 1.0, 1.0], np.float32), aggregation=Aggregation.MEAN)
    strategy.run(lambda: multiplied.scatter_mul(IndexedSlices(np.array([RANK + 2], np.float32), [RANK])))
    assert multiplied.numpy().tolist() == [2.0, 1.5, 1.0]


# --- copies and references -----------------------------------------------------------------------------


def test_copies_are_variables_of_the_strategy(strategy):
    on_read = {"synchronization": Synchronization.ON_READ, "aggregation": Aggregation.SUM}
    for options in ({"aggregation": Aggregation.SUM}, on_read):
        v = make(strategy, [1.0, 2.0], name="v", trainable=True, **options)
        if options is on_read:
            strategy.run(lambda v=v: v.assign([RANK, 2.0]))
        for w in (copy.deepcopy(v), copy.deepcopy({"v": [v]})["v"][0]):
            assert type(w) is type(v)
            assert w is not v
            assert w.distribute_strategy is strategy
            assert (w.name, w.trainable) == ("v", True)
            assert (w.synchronization, w.aggregation) == (v.synchronization, v.aggregation)
            (component,) = strategy.experimental_local_results(w)
            assert strategy.extended.value_container(component) is w
            before = v.numpy()
            np.testing.assert_array_equal(w.numpy(), before)
            strategy.run(lambda w=w: w.assign_add([1.0, RANK]))
            np.testing.assert_array_equal(v.numpy(), before)
            np.testing.assert_array_equal(w.numpy() - before, [SIZE, sum(range(SIZE))])
    one = copy.deepcopy([v, v])
    assert one[0] is one[1]


def test_copies_in_scopes(strategy):
    v = make(strategy, 1.0)
    with strategy.scope():
        assert float(copy.deepcopy(v)) == 1
    with mpistrat.OneDeviceStrategy("cpu:0").scope():
        with pytest.raises(RuntimeError, match="own strategy's scope"):
            copy.deepcopy(v)
        plain = copy.deepcopy(Variable([1.0]))
        plain.assign([2.0])
    (component,) = strategy.experimental_local_results(v)
    alone = copy.deepcopy(component)
    assert strategy.extended.value_container(alone) is alone
    alone.assign(3.0)
    assert float(v) == 1
    with pytest.raises(TypeError, match="deepcopy"):
        copy.copy(v)


def test_references(strategy):
    v, w = make(strategy, [1.0, 1.0]), make(strategy, [1.0, 1.0])
    seen = {v.ref(): "v", w.ref(): "w"}
    assert [seen[each.ref()] for each in (v, w, v)] == ["v", "w", "v"]
    assert v.ref().deref() is v
    assert v.ref() != w.ref()
    assert v.ref() != v.name
    assert len({v.ref(), v.ref(), w.ref()}) == 2


# --- reads of some rows --------------------------------------------------------------------------------


@pytest.mark.parametrize("on_read", [False, True])
def test_reads_of_some_rows(strategy, on_read):
    options = {"synchronization": Synchronization.ON_READ, "aggregation": Aggregation.SUM} if on_read else {}
    v = make(strategy, np.arange(24.0).reshape(4, 3, 2), **options)
    whole = v.numpy()
    assert v.get_shape() == v.shape == (4, 3, 2)
    for indices in (0, [3, 0, 3], [[1], [2]], np.zeros((0,), int), np.array([2], np.uint8)):
        np.testing.assert_array_equal(v.sparse_read(indices), whole[np.asarray(indices)])
    for indices in ([1], [1, 2], [3, 2, 1], [[0, 0], [3, 2]], np.zeros((2, 0, 3), int)):
        where = np.asarray(indices)
        np.testing.assert_array_equal(v.gather_nd(indices), whole[tuple(np.moveaxis(where, -1, 0))])
    for wrong in (4, -1, [[0, 7]]):
        with pytest.raises(ValueError, match="do not fit"):
            v.sparse_read(wrong)
    for wrong in ([4], [0, 3], [-1, 0]):
        with pytest.raises(ValueError, match="do not fit"):
            v.gather_nd(wrong)
    with pytest.raises(ValueError, match="4 indices"):
        v.gather_nd([0, 0, 0, 0])
    for read in (v.sparse_read, v.gather_nd):
        with pytest.raises(TypeError, match="integers"):
            read([0.5])
    part, element = v.sparse_read(1), v.gather_nd([1])
    v.assign(np.zeros(v.shape))
    np.testing.assert_array_equal(part, whole[1])
    np.testing.assert_array_equal(element, whole[1])


# --- the rest ------------------------------------------------------------------------------------------


def test_none_stands_for_the_defaults(strategy):
    v = make(strategy, 1.0, synchronization=None, aggregation=None)
    assert v.aggregation is Aggregation.NONE
    assert v.synchronization is Synchronization.ON_WRITE
    assert v.trainable


def test_variables_of_a_scope_in_the_default_scope(strategy):
    default = mpistrat.get_strategy()
    with default.scope():
        v = make(strategy, 1.0)
        assert v.distribute_strategy is strategy
        assert strategy.extended.variable_created_in_scope(v)
        assert Variable(1.0).distribute_strategy is default


def test_scatter_nd(strategy):
    v = make(strategy, np.zeros((2, 3)))
    indices, updates = np.array([[0, 1], [1, 2], [1, 2]]), np.array([2.0, 3.0, 4.0])
    assert v.scatter_nd_add(indices, updates) is v
    assert v.numpy().tolist() == [[0, 2, 0], [0, 0, 7]]
    v.scatter_nd_sub([[0]], [[1.0, 1.0, 1.0]])
    assert v.numpy().tolist() == [[-1, 1, -1], [0, 0, 7]]
    v.scatter_nd_max([[0, 0], [1, 2]], [5.0, 5.0])
    v.scatter_nd_min([[0, 1], [1, 2]], [0.0, 6.0])
    assert v.numpy().tolist() == [[5, 0, -1], [0, 0, 6]]
    v.scatter_nd_update([[0, 2], [0, 2]], [8.0, 9.0])
    assert v.numpy().tolist() == [[5, 0, 9], [0, 0, 6]]
    for wrong, kind, text in (
        (([[0, 3]], [1.0]), ValueError, "do not fit"),
        (([[0, -1]], [1.0]), ValueError, "do not fit"),
        (([[0, 1]], [1.0, 2.0]), ValueError, r"need updates of shape \(1,\)"),
        (([[0, 1, 2]], [1.0]), ValueError, "cannot take 3 indices"),
        (([[0.5, 1]], [1.0]), TypeError, "integers"),
        (([[0, 1]], [1j]), TypeError, "cast them"),
    ):
        for method in (v.scatter_nd_add, v.scatter_nd_update, v.scatter_nd_max):
            with pytest.raises(kind, match=text):
                method(*wrong)
    assert v.numpy().tolist() == [[5, 0, 9], [0, 0, 6]]


def test_scatter_nd_of_all_replicas(strategy, comm):
    """Added updates of the replicas add up, each by its own index."""
    v = make(strategy, np.zeros(5), aggregation=Aggregation.SUM)

    def step():
        rank = mpistrat.get_replica_context().replica_id_in_sync_group
        v.scatter_nd_add([[rank], [4]], [rank + 1.0, 10.0])

    strategy.run(step)
    wanted = [float(rank + 1) if rank < comm.size else 0.0 for rank in range(4)]
    assert v.numpy().tolist() == [*wanted, 10.0 * comm.size]


def test_batch_scatter_update(strategy):
    v = make(strategy, np.arange(12.0).reshape(2, 3, 2))
    v.batch_scatter_update(SimpleNamespace(values=[[[7.0, 7.0]], [[8.0, 8.0]]], indices=[[2], [0]]))
    wanted = np.arange(12.0).reshape(2, 3, 2)
    wanted[0, 2], wanted[1, 0] = 7.0, 8.0
    np.testing.assert_array_equal(v.numpy(), wanted)
    v.batch_scatter_update(IndexedSlices(np.zeros((1, 3, 2)), [1]))  # one axis: as scatter_update
    wanted[1] = 0
    np.testing.assert_array_equal(v.numpy(), wanted)
    with pytest.raises(TypeError, match="values and indices"):
        v.batch_scatter_update(np.zeros(3))


def test_the_shape_is_fixed(strategy):
    v = make(strategy, np.zeros((2, 3)))
    v.set_shape((2, 3))
    v.set_shape([None, 3])
    for wrong in ((3, 2), (2,), (2, None, 3)):
        with pytest.raises(ValueError, match=r"has shape \(2, 3\)"):
            v.set_shape(wrong)


def test_steps_on_an_iterator(strategy, comm):
    batches = iter([np.full(2, step + 1.0) for step in range(4)])

    def step(made, batch):
        assert mpistrat.in_cross_replica_context()
        before = made.last_step_outputs["count"]
        total = strategy.run(np.sum, args=(batch,))
        made.set_last_step_output("count", before + 1)
        made.set_last_step_output("total", total, "SUM")
        made.set_non_tensor_output("text", "words")

    run = strategy.extended.experimental_run_steps_on_iterator
    made = run(step, batches, 3, {"count": 0})
    assert made.last_step_outputs == {"count": 3, "total": 6.0 * comm.size}
    assert made.non_tensor_outputs == {"text": "words"}
    with pytest.raises(StopIteration):
        run(step, batches, 2, {"count": 0})
    with pytest.raises(RuntimeError, match="outside of run"):
        strategy.run(run, (step, batches))
