"""Variables as NumPy has them: operators, functions, conversion, in-place changes, copies."""

import copy
import operator
import pickle

import numpy as np
import pytest
from mpi4py import MPI
from variable_copies import equal, make, own

import mpistrat
from mpistrat import Variable
from mpistrat import VariableAggregation as Aggregation
from mpistrat import VariableSynchronization as Synchronization

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


BINARY = [operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod]
BINARY += [operator.pow, operator.lt, operator.le, operator.eq, operator.ne, operator.ge, operator.gt]


def kinds(strategy, value):
    """The value as each kind of variable, and as a mirrored value."""
    yield Variable(value)
    yield make(strategy, value)
    yield make(strategy, value, Aggregation.MEAN, on_read=True)
    yield mpistrat.Mirrored((np.array(value),))


def test_operators(strategy):
    array = np.array([1.0, 2.0, 4.0])
    for v in kinds(strategy, array):
        for op in BINARY:
            for other in (2.0, np.float32(2), [1.0, 2.0, 3.0], np.array([3.0, 2.0, 1.0])):
                np.testing.assert_array_equal(op(v, other), op(array, np.asarray(other)))
                np.testing.assert_array_equal(op(other, v), op(np.asarray(other), array))
            np.testing.assert_array_equal(op(v, v), op(array, array))
            assert type(op(v, 1)) is np.ndarray
        np.testing.assert_array_equal(-v, -array)
        np.testing.assert_array_equal(abs(v), array)
        assert v @ v == 21
        np.testing.assert_array_equal(array @ v, 21)
        np.testing.assert_array_equal(divmod(v, 2.0), divmod(array, 2.0))
    for v in kinds(strategy, 3.0):
        assert float(v) == 3
        assert int(v) == 3
        assert complex(v) == 3
        assert bool(v)
        assert f"{float(v):.1f}" == "3.0"
    for v in (Variable(True), make(strategy, True), mpistrat.Mirrored((np.True_,))):
        np.testing.assert_array_equal(~v, False)
    assert [1, 2, 3][Variable(1)] == 2


def test_functions_of_numpy(strategy):
    array = np.arange(6.0).reshape(2, 3)
    for v in kinds(strategy, array):
        for fn in (
            np.exp,
            np.sum,
            np.mean,
            np.transpose,
            np.ravel,
            np.linalg.norm,
            np.shape,
            np.ndim,
            np.size,
            np.max,
            np.argmax,
            np.copy,
            np.array,
            lambda x: np.concatenate([x, x]),
            lambda x: np.stack([x, array]),
            lambda x: np.dot(x, np.ones(3)),
            lambda x: np.einsum("ij->j", x),
            lambda x: np.where(x > 2, x, 0),
            lambda x: np.add.reduce(x, axis=1),
            lambda x: np.add.accumulate(x),
            lambda x: np.multiply.outer(x, x),
            lambda x: np.allclose(x, array),
            lambda x: np.array_equal(x, array),
            lambda x: np.clip(x, 1, 2),
            lambda x: x[1],
            lambda x: x[:, 1:],
            lambda x: x[x > 2],
            lambda x: x[..., None],
            list,
        ):
            np.testing.assert_array_equal(fn(v), fn(array))
        assert np.isclose(v, array).all()


def test_conversion_to_arrays(strategy):
    for v in kinds(strategy, [1.0, 2.0]):
        view = np.asarray(v)
        assert not view.flags.writeable
        with pytest.raises(ValueError):
            view[0] = 5
        for copied in (np.array(v), v.read_value() if isinstance(v, Variable) else np.array(v)):
            copied[0] = 5
        assert np.asarray(v, np.float32).dtype == np.float32
        assert np.array(v, copy=True).flags.writeable
        np.testing.assert_array_equal(v, [1, 2])
        with pytest.raises(ValueError):
            v.__array__(np.float32, copy=False)
        with pytest.raises(ValueError):
            v[:][0] = 5
        for row in v:
            assert row in (1, 2)
    v = make(strategy, [1.0, 2.0])
    view = np.asarray(v)
    v.assign([3.0, 4.0])
    np.testing.assert_array_equal(view, [3, 4])


def test_in_place_operators(strategy):
    for v in (Variable([1.0, 2.0]), make(strategy, [1.0, 2.0]), make(strategy, [1.0, 2.0], Aggregation.SUM)):
        same, strategy_of_v = v, v.distribute_strategy
        v += 1
        v *= [2.0, 3.0]
        v -= np.array([1.0, 0.0])
        v /= 2
        v **= 2
        assert v is same
        np.testing.assert_array_equal(strategy_of_v.experimental_local_results(v)[0].array, [2.25, 20.25])
        np.add(v, 1, out=v)
        np.testing.assert_array_equal(v, [3.25, 21.25])
        v[0] = 7
        v[1:] = [8]
        np.testing.assert_array_equal(v, [7, 8])
        with pytest.raises((ValueError, TypeError)):
            v += np.ones((2, 2))
        with pytest.raises(TypeError):
            v += 1j
        np.testing.assert_array_equal(v, [7, 8])
    integers = make(strategy, [1, 2])
    with pytest.raises(TypeError):
        integers += 0.5
    equal(integers, [1, 2])
    out = np.empty(2)
    v = make(strategy, [1.0, 2.0])
    assert np.multiply(v, 2, out=out) is out
    np.testing.assert_array_equal(out, [2, 4])


def test_in_place_operators_follow_the_rules_of_writing(strategy):
    v = make(strategy, [1.0], name="kernel")

    def add():
        nonlocal v
        v += 1

    with pytest.raises(ValueError, match="kernel"):
        strategy.run(add)
    with pytest.raises(ValueError, match="kernel"):
        strategy.run(lambda: np.add(v, 1, out=v))
    with pytest.raises(ValueError, match="kernel"):
        strategy.run(lambda: v.__setitem__(0, 1.0))
    equal(v, [1])
    v = make(strategy, 0.0, Aggregation.MEAN, on_read=True)
    strategy.run(add)
    equal(v, 1)
    with pytest.raises((ValueError, RuntimeError)), mpistrat.MirroredStrategy().scope():
        add()


def test_numbers_in_a_list_have_the_precision_of_the_variable(strategy):
    """As one Python number has: integers are a mean's floats, ranks may mix them, and none wraps around."""
    v = make(strategy, np.zeros(2, np.float32), Aggregation.MEAN)
    strategy.run(lambda: v.assign([1, 2] if RANK % 2 else (1.0, 2.0)))
    equal(v, [1, 2])
    small = make(strategy, np.zeros(2, np.int8), Aggregation.SUM, name="small")
    strategy.run(lambda: small.assign_add([1, 2]))
    equal(small, [SIZE, 2 * SIZE])
    for write in (lambda: strategy.run(lambda: small.assign([300, 0])), lambda: small.assign((0, -129))):
        with pytest.raises(ValueError, match=r"small.* int8, which cannot hold (300|-129)"):
            write()
    with pytest.raises(TypeError, match="float64"):
        strategy.run(lambda: small.assign([0.5, 1]))
    equal(small, [SIZE, 2 * SIZE])


def test_variables_and_strategies_are_not_pickled(strategy):
    """Nor what holds them; values are."""
    with strategy.scope():
        variables = [Variable(1.0, name="v"), Variable(1.0, name="v", synchronization=Synchronization.ON_READ)]
    for v in (*variables, Variable(1.0, name="v"), variables[0].values[0]):
        for action in (pickle.dumps, copy.copy):
            with pytest.raises(TypeError, match=r"variable 'v.*read_value"):
                action([v] if action is pickle.dumps else v)
    for made in (
        strategy,
        mpistrat.MirroredStrategy(),
        mpistrat.get_strategy(),
        strategy.run(mpistrat.get_replica_context),
    ):
        with pytest.raises(TypeError, match=r"(?i)strategy.*cannot be pickled"):
            pickle.dumps(made)
    assert pickle.loads(pickle.dumps(variables[0].read_value())) == 1


def test_in_place_in_a_replica_by_aggregation(strategy):
    """What is not written stays as it is: also where the replicas' values are added up."""
    v = make(strategy, [5.0, 6.0], Aggregation.SUM, name="kernel")

    def add():
        nonlocal v
        v += 1

    for write in (add, lambda: v.__setitem__(0, 1.0), lambda: np.add.at(v, [0], 1.0)):
        with pytest.raises(ValueError, match=r"kernel.*assign_add"):
            strategy.run(write)
        equal(v, [5, 6])
    strategy.extended.update(v, lambda copy: copy.__setitem__(0, 4.0))
    add()
    equal(v, [5, 7])
    for aggregation in (Aggregation.MEAN, Aggregation.ONLY_FIRST_REPLICA):
        v = make(strategy, [5.0, 6.0], aggregation)
        strategy.run(add)
        strategy.run(lambda v=v: v.__setitem__(0, 4.0))
        equal(v, [4, 7])


def test_nothing_writes_around_the_rules(strategy):
    """``ufunc.at`` and multiple outputs neither change a copy silently nor lose a result."""
    v = make(strategy, [1.0, 2.0])

    def at():
        np.add.at(v, [0], 5.0)

    before = own(v).copy()
    with pytest.raises((TypeError, ValueError)):
        strategy.run(at)
    equal(v, before)
    w = make(strategy, [0.0, 0.0])
    quotient, remainder = np.divmod(np.array([5.0, 7.0]), 2.0, out=(w, None))
    assert quotient is w
    equal(w, [2, 3])
    np.testing.assert_array_equal(remainder, [1, 1])


def test_copies(strategy):
    for v in kinds(strategy, [1.0, 2.0]):
        if isinstance(v, mpistrat.Mirrored) and not isinstance(v, Variable):
            other = copy.deepcopy(v)
            other.values[0][0] = 9
            np.testing.assert_array_equal(v, [1, 2])
            np.testing.assert_array_equal(pickle.loads(pickle.dumps(v)), [1, 2])
        else:
            other = copy.deepcopy(v)
            own(other)[0] = 9
            np.testing.assert_array_equal(own(v), [1, 2])
