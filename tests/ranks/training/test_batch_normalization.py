"""Batch normalization over replicas is that of one process with all rows."""

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.training import BatchNormalization, global_moments

SIZE = MPI.COMM_WORLD.size
EPSILON = 1e-3


def own(array, replica, size, axis=0):
    """Rows of a replica: of uneven numbers, the last one has none if there are several."""
    cuts = np.linspace(0, array.shape[axis], max(size - 1, 1) + 1).astype(int)
    return np.split(array, cuts[1:], axis)[replica]


def serial(x, gradient, axis, gamma):
    """y, dx, dgamma and dbeta by the formulas, in float64."""
    x, gradient = x.astype(np.float64), gradient.astype(np.float64)
    axes = tuple(each for each in range(x.ndim) if each != axis % x.ndim)
    n = np.prod([x.shape[each] for each in axes])
    inverse = 1 / np.sqrt(x.var(axes, keepdims=True) + EPSILON)
    normalized = (x - x.mean(axes, keepdims=True)) * inverse
    shape = [1] * x.ndim
    shape[axis] = -1
    along = gamma.reshape(shape)
    sums = [each.sum(axes, keepdims=True) for each in (gradient, gradient * normalized)]
    dx = along * inverse * (gradient - sums[0] / n - normalized * sums[1] / n)
    return normalized * along, dx, sums[1].ravel(), sums[0].ravel()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(("shape", "axis"), [((13, 3), -1), ((9, 4, 5), 1), ((10, 2, 3, 2), -1)])
@pytest.mark.parametrize("replicas", [None, 5])
def test_as_one_process(shape, axis, dtype, replicas):
    strategy = mpistrat.MultiWorkerMirroredStrategy(virtual_replicas=replicas)
    size = strategy.num_replicas_in_sync
    rng = np.random.default_rng(1)
    x, gradient = (rng.normal(size=shape).astype(dtype) for _ in range(2))
    with strategy.scope():
        layer = BatchNormalization(axis=axis, epsilon=EPSILON, momentum=0.5, synchronized=True)
        layer.build(shape)
        gamma = np.arange(1, shape[axis] + 1, dtype=np.float32)
        layer.gamma.assign(gamma)

    def step():
        number = mpistrat.get_replica_context().replica_id_in_sync_group
        y = layer(own(x, number, size), training=True)
        dx, gradients = layer.backward(own(gradient, number, size))
        return [y, dx, *mpistrat.get_replica_context().all_reduce("SUM", gradients)]

    got = strategy.run(step)
    expected = serial(x, gradient, axis, gamma)
    close = {"rtol": 1e-2, "atol": 1e-2} if dtype == np.float16 else {"rtol": 2e-4, "atol": 2e-5}
    for place, (mine, whole) in enumerate(zip(got, expected, strict=True)):
        for number, each in enumerate(strategy.experimental_local_results(mine)):
            first = strategy.extended.engine.replicas.first + number
            wanted = own(whole, first, size) if place < 2 else whole
            assert each.dtype == (dtype if place < 2 else np.float32)
            np.testing.assert_allclose(each, wanted, **close)
    axes = tuple(each for each in range(x.ndim) if each != axis % x.ndim)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(layer.moving_mean.read_value(), 0.5 * wide.mean(axes), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(layer.moving_variance.read_value(), 0.5 + 0.5 * wide.var(axes), rtol=1e-3)


def test_far_from_zero():
    """The mean of squares less the square of the mean would give a variance of 0 or less in float32."""
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    x = np.array([[10001.0], [10002.0], [10003.0], [10004.0]] * SIZE, np.float32) + 1e5

    def fn():
        number = mpistrat.get_replica_context().replica_id_in_sync_group
        return global_moments(x[4 * number : 4 * number + 4], [0])

    count, mean, variance = strategy.run(fn)
    assert (count, mean.tolist()) == (4 * SIZE, [110002.5])
    np.testing.assert_allclose(variance, [1.25], rtol=1e-5)


def test_no_rows_anywhere():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    with strategy.scope():
        layer = BatchNormalization(synchronized=True)
    empty = np.empty((0, 2), np.float32)
    y = strategy.run(lambda: layer(empty, training=True))
    assert y.shape == (0, 2)
    dx, gradients = strategy.run(lambda: layer.backward(empty))
    assert dx.shape == (0, 2)
    assert [each.tolist() for each in gradients] == [[0, 0], [0, 0]]


def test_other_channels_on_one_rank():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    with strategy.scope():
        layer = BatchNormalization(synchronized=True)
        layer.build((None, 2))
    number = strategy.extended.engine.replicas.first
    x = np.ones((3, 3 if number == 0 else 2), np.float32)
    if SIZE == 1:
        with pytest.raises(ValueError, match="has 2 channels, and got an array of shape"):
            strategy.run(lambda: layer(x, training=True))
        return
    with pytest.raises(RuntimeError, match="all_reduce"):
        strategy.run(lambda: layer(x, training=True))
    strategy.barrier()


def test_a_frozen_layer_is_in_inference():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    with strategy.scope():
        layer = BatchNormalization(synchronized=True, trainable=False, epsilon=0.0)
    x = np.array([[1.0, 2.0]], np.float32)
    assert strategy.run(lambda: layer(x, training=True)).tolist() == x.tolist()
    with pytest.raises(RuntimeError, match="call the layer with training=True before backward"):
        strategy.run(lambda: layer.backward(x))


@pytest.mark.parametrize("options", [{"momentum": 1.5}, {"epsilon": -1.0}])
def test_wrong_arguments(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        BatchNormalization(**options)
