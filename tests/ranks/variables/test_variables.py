"""Making variables: kinds, initial values, names, and what each rank has."""

import gc
import re
import weakref

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from variable_copies import equal, make, own

import mpistrat
from mpistrat import Variable
from mpistrat import VariableAggregation as Aggregation
from mpistrat import VariableSynchronization as Synchronization
from mpistrat.variables import LocalVariable, MirroredVariable, SyncOnReadVariable

RANK = MPI.COMM_WORLD.rank


# --- creating ------------------------------------------------------------------------------------------


def test_kinds(strategy):
    assert type(make(strategy)) is MirroredVariable
    assert type(make(strategy, on_read=True)) is SyncOnReadVariable
    assert type(Variable(1.0)) is LocalVariable
    assert type(make(mpistrat.OneDeviceStrategy("cpu:0"))) is LocalVariable
    for synchronization in (Synchronization.AUTO, Synchronization.ON_WRITE):
        with strategy.scope():
            v = Variable(1.0, synchronization=synchronization)
        assert v.synchronization is Synchronization.ON_WRITE
    assert all(isinstance(each, Variable) for each in (make(strategy), make(strategy, on_read=True)))
    assert isinstance(make(strategy), mpistrat.DistributedValues)


def test_initial_value_comes_from_replica_0(strategy):
    for on_read in (False, True):
        equal(make(strategy, np.full(3, RANK + 5.0), on_read=on_read), [5, 5, 5])
        calls = []
        v = make(strategy, lambda calls=calls: calls.append(1) or np.float32(RANK + 7), on_read=on_read)
        equal(v, 7)
        assert v.dtype == np.float32
        assert calls == [1]
    v = make(strategy, np.random.default_rng(RANK).normal(size=100))
    equal(v, np.random.default_rng(0).normal(size=100))


def test_initial_value_is_copied(strategy):
    for creator in (lambda x: make(strategy, x), lambda x: make(strategy, x, on_read=True), Variable):
        array = np.ones(3)
        v = creator(array)
        array[:] = 9
        np.testing.assert_array_equal(v.distribute_strategy.experimental_local_results(v)[0].array, 1)
        again = creator(v) if not isinstance(v, SyncOnReadVariable) else None
        if again is not None:
            again.assign_add(np.ones(3))
            np.testing.assert_array_equal(v, 1)


def test_dtypes_of_initial_values(strategy):
    for value, dtype, wanted in [
        (1, None, np.int64),
        (1.0, None, np.float64),
        (True, None, np.bool_),
        ([1, 2.5], None, np.float64),
        (1, "float32", np.float32),
        (np.float16(1), None, np.float16),
        (1, ml_dtypes.bfloat16, ml_dtypes.bfloat16),
        (np.ones(2, ">f8"), None, np.float64),
        (np.asfortranarray(np.ones((2, 3))), None, np.float64),
        (np.zeros((0, 3)), None, np.float64),
    ]:
        v = make(strategy, value, dtype=dtype)
        assert v.dtype == np.dtype(wanted)
        assert own(v).flags.c_contiguous
        assert v.shape == np.shape(value)
        assert v.ndim == np.ndim(value)
        assert v.size == np.size(value)


@pytest.mark.parametrize("value", [None, object(), [None], lambda: None, [[1.0], [2.0, 3.0]], {"a": 1}])
def test_initial_values_that_are_none(strategy, value):
    for creator in (lambda: make(strategy, value), lambda: Variable(value)):
        with pytest.raises(ValueError):
            creator()
    assert strategy.agree(True)


def test_arguments_that_are_wrong(strategy):
    for options, error in [
        ({"synchronization": Synchronization.NONE}, ValueError),
        ({"synchronization": "ON_WRITE"}, TypeError),
        ({"synchronization": 3}, TypeError),
        ({"aggregation": "SUM"}, TypeError),
        ({"aggregation": mpistrat.ReduceOp.SUM}, TypeError),
        ({"aggregation": Aggregation.MEAN, "dtype": "int32"}, ValueError),
        ({"aggregation": Aggregation.MEAN, "dtype": "bool"}, ValueError),
        ({"aggregation": Aggregation.MEAN, "dtype": "U3"}, ValueError),
        ({"aggregation": Aggregation.MEAN, "dtype": "i4,f4"}, ValueError),
        ({"aggregation": Aggregation.SUM, "dtype": "no such dtype"}, TypeError),
    ]:
        with pytest.raises(error), strategy.scope():
            Variable(1, **options)
        assert not mpistrat.has_strategy()
    for dtype in ("float16", "float32", ml_dtypes.bfloat16, "complex64"):
        assert float(make(strategy, 1, Aggregation.MEAN, dtype=dtype).read_value().real) == 1
    assert strategy.agree(True)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    "options",
    [
        lambda: {"initial_value": np.ones(2 + RANK)},
        lambda: {"initial_value": np.ones((2,) * (1 + RANK % 2))},
        lambda: {"initial_value": np.ones(2, ["f4", "f8"][RANK % 2])},
        lambda: {"initial_value": 1.0, "name": f"v{RANK}"},
        lambda: {"initial_value": 1.0, "trainable": bool(RANK % 2)},
        lambda: {"initial_value": 1.0, "aggregation": [Aggregation.SUM, Aggregation.MEAN][RANK % 2]},
        lambda: {
            "initial_value": 1.0,
            "synchronization": [Synchronization.ON_READ, Synchronization.ON_WRITE][RANK % 2],
        },
    ],
)
def test_replicas_that_differ(strategy, options):
    with pytest.raises(ValueError, match=r"ranks? [\d, -]*1") as caught, strategy.scope():
        Variable(**options())
    assert re.search("ranks? 0", str(caught.value))
    assert strategy.agree(True)
    assert not mpistrat.has_strategy()
    equal(make(strategy, 3.0), 3)


def test_names(strategy):
    assert [make(strategy).name for _ in range(3)] == ["Variable", "Variable_1", "Variable_2"]
    v = make(strategy, name="kernel")
    assert v.name == "kernel"
    (component,) = strategy.experimental_local_results(v)
    assert component.name == (f"kernel/replica_{RANK}" if RANK else "kernel")
    assert make(strategy, name="kernel").name == "kernel"


def test_properties(strategy):
    v = make(strategy, np.ones((2, 3), np.float32), Aggregation.SUM)
    assert v.trainable is True
    assert make(strategy, on_read=True).trainable is False
    assert make(strategy, on_read=True, trainable=True).trainable is True
    assert make(strategy, trainable=False).trainable is False
    assert v.aggregation is Aggregation.SUM
    assert v.distribute_strategy is strategy
    assert v.device == "cpu:0"
    assert len(v) == 2
    with pytest.raises(TypeError):
        len(make(strategy))


def test_components(strategy):
    v = make(strategy, [1.0, 0.0])
    (component,) = strategy.experimental_local_results(v)
    assert strategy.extended.value_container(component) is v
    assert strategy.extended.value_container(v) is v
    assert strategy.extended.value_container(7) == 7
    zero = make(strategy, 0.0)
    assert strategy.extended.value_container(strategy.experimental_local_results(zero)[0]) is zero
    other = mpistrat.OneDeviceStrategy("cpu:0")
    assert strategy.extended.variable_created_in_scope(v)
    assert not other.extended.variable_created_in_scope(v)
    assert mpistrat.get_strategy().extended.variable_created_in_scope(Variable(1.0))


def test_variables_are_collected(strategy):
    v = make(strategy, np.ones(10))
    reference = weakref.ref(v)
    (component,) = strategy.experimental_local_results(v)
    del v
    gc.collect()
    assert reference() is None
    assert strategy.extended.value_container(component) is component


# --- compared when asked for ---------------------------------------------------------------------------


def different(strategy, **options):
    """Of two variables that agree in all but identity another one on replica 0 than elsewhere."""
    return [make(strategy, name="v", **options) for _ in range(2)][min(RANK, 1)]


@pytest.fixture
def comparing(monkeypatch):
    """A strategy whose ranks compare variables: an option that each communicator reads once."""
    monkeypatch.setenv("MPISTRAT_DEBUG", "variables")
    comm = MPI.COMM_WORLD.Dup()
    yield mpistrat.MultiWorkerMirroredStrategy(comm=comm)
    comm.Free()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("aggregation", [Aggregation.SUM, Aggregation.ONLY_FIRST_REPLICA])
def test_different_variables_are_told(comparing, aggregation):
    strategy = comparing
    v = different(strategy, aggregation=aggregation)
    for write in (v.assign, v.assign_add):
        with pytest.raises(RuntimeError, match=r"rank 0: assign\S* of a variable v created in collective"):
            strategy.run(write, args=(2.0,))
        with pytest.raises(RuntimeError, match=r"rank 0: assign\S* of a variable v created in collective"):
            write(2.0)
    counted = different(strategy, aggregation=aggregation, on_read=True)
    with pytest.raises(RuntimeError, match="rank 0: read of a variable v created in collective"):
        counted.read_value()


@pytest.mark.ranks(min=2)
def test_different_copies_are_told(comparing):
    strategy = comparing
    v = make(strategy, name="v")
    v.assign(3.0)
    assert strategy.run(v.read_value) == 3.0
    with pytest.raises(RuntimeError, match="variable 'v' differs between replicas after assign_add: ranks"):
        v.assign_add(float(RANK))
