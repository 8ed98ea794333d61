"""Optimizers against their formulas, written serially."""

import functools

import numpy as np
import pytest

import mpistrat
from mpistrat.optimizers import SGD, Adam, AdamW

RATE = 0.1
SHAPES = [(3,), (), (41, 17), (300, 401)]


@functools.cache
def normal(shape, rank, step):
    return np.random.default_rng([rank, step, *shape]).standard_normal(shape)


def gradient(shape, rank, step, dtype):
    return np.array(normal(shape, rank, step), dtype)


def sgd(w, g, m, step):
    return w - RATE * g, m


def momentum(w, g, m, step):
    m = 0.9 * m - RATE * g
    return w + m, m


def nesterov(w, g, m, step):
    m = 0.9 * m - RATE * g
    return w + 0.9 * m - RATE * g, m


def adam(w, g, state, step):
    m, v = state if isinstance(state, tuple) else (0.0, 0.0)
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    rate = RATE * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    return w - rate * m / (np.sqrt(v) + 1e-7), (m, v)


def amsgrad(w, g, state, step):
    m, v, largest = state if isinstance(state, tuple) else (0.0, 0.0, 0.0)
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    largest = np.maximum(largest, v)
    rate = RATE * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    return w - rate * m / (np.sqrt(largest) + 1e-7), (m, v, largest)


def adamw(w, g, state, step):
    return adam(w * (1 - RATE * 0.01), g, state, step)


METHODS = {
    "sgd": (lambda: SGD(RATE), sgd),
    "momentum": (lambda: SGD(RATE, momentum=0.9), momentum),
    "nesterov": (lambda: SGD(RATE, momentum=0.9, nesterov=True), nesterov),
    "adam": (lambda: Adam(RATE), adam),
    "amsgrad": (lambda: Adam(RATE, amsgrad=True), amsgrad),
    "adamw": (lambda: AdamW(RATE, weight_decay=0.01), adamw),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_as_the_formula(strategy, name, dtype):
    make, formula = METHODS[name]
    optimizer = make()
    with strategy.scope():
        variables = [mpistrat.Variable(np.ones(shape, dtype)) for shape in SHAPES]
    replicas = strategy.num_replicas_in_sync

    def step(number):
        rank = mpistrat.get_replica_context().replica_id_in_sync_group
        gradients = [gradient(shape, rank, number, dtype) for shape in SHAPES]
        kept = [g.copy() for g in gradients]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        for g, before in zip(gradients, kept, strict=True):
            np.testing.assert_array_equal(g, before)

    for number in range(4):
        strategy.run(step, (number,))
    assert optimizer.iterations == 4
    for shape, variable in zip(SHAPES, variables, strict=True):
        w, state = np.ones(shape), 0.0
        for number in range(4):
            total = sum(gradient(shape, rank, number, dtype).astype(float) for rank in range(replicas))
            w, state = formula(w, total, state, number + 1)
        tolerance = 2e-5 if dtype is np.float32 else 1e-12
        np.testing.assert_allclose(variable.read_value(), w, rtol=tolerance, atol=tolerance)
        bits = strategy.comm.allgather(variable.read_value().tobytes())
        assert len(set(bits)) == 1


def test_a_rate_may_depend_on_the_step(strategy):
    optimizer = SGD(lambda step: 1.0 if step == 0 else 0.0)
    with strategy.scope():
        v = mpistrat.Variable(0.0)
    for _ in range(3):
        strategy.run(lambda: optimizer.apply_gradients([(1.0, v)]))
    assert float(v) == -strategy.num_replicas_in_sync


def test_the_rate_may_be_set(strategy):
    optimizer = SGD(1.0)
    with strategy.scope():
        v = mpistrat.Variable(0.0)
    optimizer.learning_rate = 0.25
    strategy.run(lambda: optimizer.apply_gradients([(1.0, v)]))
    assert float(v) == -0.25 * strategy.num_replicas_in_sync


def test_gradients_that_were_reduced_are_not_added_again(strategy):
    optimizer = SGD(1.0)
    with strategy.scope():
        v = mpistrat.Variable(0.0)
    strategy.run(lambda: optimizer.apply_gradients([(1.0, v)], experimental_aggregate_gradients=False))
    assert float(v) == -1.0


def test_none_leaves_a_variable_as_it_is(strategy):
    optimizer = SGD(1.0)
    with strategy.scope():
        u, v = mpistrat.Variable(1.0), mpistrat.Variable(1.0)
    strategy.run(lambda: optimizer.apply_gradients([(None, u), (1.0, v)]))
    assert [float(u), float(v)] == [1.0, 1.0 - strategy.num_replicas_in_sync]


@pytest.mark.parametrize("make", [lambda: SGD(1.0), lambda: SGD(1.0, momentum=0.5), lambda: Adam(0.1)])
def test_sparse_rows_do_as_the_dense_gradient(strategy, make):
    sparse, dense = make(), make()
    with strategy.scope():
        u, v = mpistrat.Variable(np.ones((5, 2))), mpistrat.Variable(np.ones((5, 2)))

    def step():
        rank = mpistrat.get_replica_context().replica_id_in_sync_group
        rows = mpistrat.IndexedSlices(np.full((3, 2), rank + 1.0), [rank, 4, 4], (5, 2))
        sparse.apply_gradients([(rows, u)])
        dense.apply_gradients([(rows.to_dense(), v)])

    strategy.run(step)
    strategy.run(step)
    np.testing.assert_allclose(u.read_value(), v.read_value(), rtol=1e-12)


def test_its_memory_is_saved_and_loaded(strategy, tmp_path):
    with strategy.scope():
        v = mpistrat.Variable([1.0, 2.0], name="v")
    first = Adam(0.1)
    for _ in range(2):
        strategy.run(lambda: first.apply_gradients([(np.ones(2), v)]))
    mpistrat.training.save([v, *first.variables], tmp_path / "state.h5")
    strategy.run(lambda: first.apply_gradients([(np.ones(2), v)]))
    expected = v.read_value()

    second = Adam(0.1)
    second.build([v])
    mpistrat.training.load([v, *second.variables], tmp_path / "state.h5")
    assert second.iterations == 2
    strategy.run(lambda: second.apply_gradients([(np.ones(2), v)]))
    np.testing.assert_array_equal(v.read_value(), expected)


def test_without_a_strategy():
    v = mpistrat.Variable(1.0)
    SGD(0.5).apply_gradients([(1.0, v)])
    assert float(v) == 0.5


def test_misuse_raises_before_anything_is_sent(strategy):
    optimizer = SGD(0.1)
    with strategy.scope():
        v, scalar = mpistrat.Variable(np.ones(3)), mpistrat.Variable(1.0)
    other = mpistrat.MultiWorkerMirroredStrategy()
    with other.scope():
        stranger = mpistrat.Variable(1.0)

    def apply(pairs):
        strategy.run(lambda: optimizer.apply_gradients(pairs))

    with strategy.scope(), pytest.raises(RuntimeError, match=r"strategy\.run"):
        optimizer.apply_gradients([(np.ones(3), v)])
    with pytest.raises(ValueError, match="No gradients"):
        apply([(None, v)])
    with pytest.raises(ValueError, match="shape"):
        apply([(np.ones(2), v)])
    with pytest.raises(ValueError, match="dtype"):
        apply([(np.ones(3, complex), v)])
    with pytest.raises(ValueError, match=r"^apply_gradients: .* created by"):
        apply([(1.0, stranger)])
    for index in (-1, 3):
        with pytest.raises(ValueError, match=f"^variable 'Variable' has 3 rows.*{index}"):
            apply([(1.0, scalar), (mpistrat.IndexedSlices([1.0, 1.0], [1, index]), v)])
    with pytest.raises(ValueError, match=r"has shape \(\)"):
        apply([(mpistrat.IndexedSlices([1.0], [0]), scalar)])
    with pytest.raises(TypeError, match="complex"):
        apply([(mpistrat.IndexedSlices([1j], [0]), v)])
    np.testing.assert_array_equal(v, np.ones(3))
    assert float(scalar) == 1
    with pytest.raises(ValueError, match="learning_rate"):
        SGD(-1.0)
    with pytest.raises(ValueError, match="momentum"):
        SGD(0.1, momentum=1.0)
    with pytest.raises(ValueError, match="nesterov"):
        SGD(0.1, nesterov=True)
    with pytest.raises(ValueError, match="beta_2"):
        Adam(beta_2=1.0)
    with pytest.raises(ValueError, match="weight_decay"):
        AdamW(weight_decay=-1.0)
    assert optimizer.iterations == 0
    optimizer = SGD(lambda step: 1 / step)
    with pytest.raises(ZeroDivisionError):
        apply([(np.ones(3), v)])
    assert optimizer.variables == []


@pytest.mark.ranks(min=2)
def test_gradients_that_differ_between_ranks_raise_on_all(strategy):
    optimizer = SGD(0.1)
    with strategy.scope():
        u, v = mpistrat.Variable(np.ones(3)), mpistrat.Variable(np.ones(3))
    first = strategy.is_chief
    for pairs in (
        [(np.ones(3), u)] if first else [(np.ones(3), u), (np.ones(3), v)],
        [(np.ones(3, np.float32 if first else np.float64), u)],
        [(np.ones(3 if first else 4), u)],
        [(np.ones(3) if first else None, u)],
    ):
        with pytest.raises(ValueError, match="all_reduce") as caught:
            strategy.run(lambda pairs=pairs: optimizer.apply_gradients(pairs))
        assert "rank 0" in str(caught.value)
        assert __file__ in str(caught.value)
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), u)]))
    assert optimizer.iterations == 1


def test_reduced_gradients_by_either_name(strategy):
    with strategy.scope():
        v, w = mpistrat.Variable(1.0), mpistrat.Variable(1.0)
    strategy.run(lambda: mpistrat.optimizers.SGD(0.5).apply_gradients([(1.0, v)], skip_gradients_aggregation=True))
    strategy.run(
        lambda: mpistrat.optimizers.SGD(0.5).apply_gradients([(1.0, w)], experimental_aggregate_gradients=False)
    )
    assert float(v) == float(w) == 0.5
