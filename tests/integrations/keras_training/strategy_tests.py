"""Keras' tests of TensorFlow's strategies, on each backend: ``mpistrat run -n 2 strategy_tests.py [TEST ...]``.

- keras/src/backend/tensorflow/distribute_test.py (7 tests): 6 are here. Variables are Keras' own on every rank, not
  TensorFlow's mirrored ones, so ``synchronization`` has no meaning.
- optimizer_distribute_test.py (10, with two optimizers of one test): 8 are here, with their numbers. Theirs give
  gradients to an optimizer in ``strategy.run``; here a model whose gradients these are is trained on a batch of two
  rows, with the sum where theirs adds replicas. There is no tf_keras, and ``stateless_apply`` has no part in it.
- integration_tests/tf_distribute_training_test.py (1): it is here.
"""

import contextlib
import sys

import keras
import numpy as np
import pytest
from keras import layers, ops
from parity import strategy

TESTS = [
    "variable_creation",
    "strategy_run",
    "epoch_iterator",
    "variable_aggregation",
    "seed_generator",
    "correctness_with_fit_and_regularizer",
    "config",
    "single_step",
    "weight_decay",
    "correctness_with_golden",
    "clip_norm",
    "clip_value",
    "ema",
    "gradient_accumulation",
    "model_fit",
]
RANKS, RANK = strategy.num_replicas_in_sync, strategy.comm.rank


def close(one, other, tolerance=1e-6):
    np.testing.assert_allclose(ops.convert_to_numpy(one), other, atol=tolerance, rtol=tolerance)


def alike(value):
    """Fail unless all ranks have this value."""
    for each in strategy.comm.allgather(value):
        for one, other in zip(keras.tree.flatten(each), keras.tree.flatten(value), strict=True):
            assert np.array_equal(one, other), (one, other)


# --- distribute_test ---------------------------------------------------------------------------


def variable_creation():
    dense = layers.Dense(2)
    dense.build([4, 2])
    assert isinstance(dense.kernel, keras.Variable)
    model = keras.Sequential([keras.Input((2,)), dense])
    model.compile("sgd", "mse")
    rows = np.zeros((2, 2)), np.ones((2, 2))
    dense.set_weights([np.full((2, 2), RANK + 1.0), np.full(2, RANK + 1.0)])
    with pytest.raises(ValueError, match=f"{dense.name}/kernel of rank 1 is not that of rank 0"):
        model.fit(*rows, verbose=0)
    dense.set_weights([np.ones((2, 2)), np.ones(2)])
    model.fit(*rows, verbose=0)  # of these rows no gradient comes
    close(dense.kernel, np.ones((2, 2)))
    close(dense.bias, np.ones(2))


def strategy_run():
    x = keras.Input((4,))
    model = keras.Model(x, layers.Dense(2)(x))
    model.set_weights([np.ones((4, 2)), np.zeros(2)])
    made = [np.zeros((8, 4), "f"), np.ones((8, 4), "f")]
    data = strategy.experimental_distribute_values_from_function(
        lambda context: made[context.replica_id_in_sync_group == 1]
    )
    result = strategy.run(lambda rows: ops.convert_to_numpy(model(rows)), args=(data,))
    total = strategy.gather(result, axis=0).reshape(RANKS, 8, 2)
    for rank in range(RANKS):
        close(total[rank], np.full((8, 2), 4.0 * (rank == 1)))


def epoch_iterator():
    rows = []

    class Seen(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            rows.append((x.shape, y.shape, sample_weight.shape))
            return super().compute_loss(x, y, y_pred, sample_weight, training)

    x = keras.Input((16,))
    model = Seen(x, layers.Dense(4)(x))
    model.compile("sgd", "mse", run_eagerly=True)
    random = np.random.default_rng(0)
    weights = random.random(100)
    model.fit(random.random((100, 16)), random.random((100, 4)), 16, sample_weight=weights, verbose=0)
    whole = [16] * 6 + [4]
    own = [max(size // RANKS + (size % RANKS > RANK), 1) for size in whole]
    assert [tuple(map(tuple, each)) for each in rows[-7:]] == [((n, 16), (n, 4), (n,)) for n in own], rows


def variable_aggregation():
    x = np.random.default_rng(0).random((4, 4))
    assert keras.Variable(x).aggregation == "none"
    assert keras.Variable(x, aggregation="sum").aggregation == "sum"
    total = keras.metrics.Sum()
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[Named(total)])
    close(model.evaluate(x, x[:, :1], verbose=0, return_dict=True)["named"], x[:, 0].sum(), 1e-5)


class Named(keras.metrics.Sum):
    """The sum of the targets."""

    def __init__(self, of):
        super().__init__(name="named", dtype=of.dtype)

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(y_true)


def seed_generator():
    generator = keras.random.SeedGenerator(42)
    state = strategy.run(lambda: ops.convert_to_numpy(generator.state.value))
    for each in strategy.comm.allgather(np.asarray(state).tolist()):
        assert each == [42, 0]


def correctness_with_fit_and_regularizer():
    def trained():
        constant, regularizer = keras.initializers.Constant(1), keras.regularizers.L1L2(l1=0.01, l2=0.01)
        layer = layers.Dense(1, use_bias=False, kernel_initializer=constant, kernel_regularizer=regularizer)
        model = keras.Sequential([keras.Input((1,)), layer])
        model.compile("sgd", "mse")
        history = model.fit(np.ones((12, 1)), np.zeros((12, 1)), batch_size=12, epochs=1, verbose=0).history
        return [*history["loss"], float(layer.kernel.numpy()[0, 0])]

    plain = trained()
    with strategy.scope():
        mine = trained()
    alike(mine)
    close(mine, plain)


# --- optimizer_distribute_test ----------------------------------------------------------------------


class Weights(keras.layers.Layer):
    """Variables; the gradient by each is the mean of a part of the rows of the input."""

    def __init__(self, **starts):
        super().__init__()
        for name, start in starts.items():
            value = np.array(start, "f")
            self.add_weight(name=name, shape=value.shape, initializer="zeros")
        self.starts = [np.array(start, "f") for start in starts.values()]

    def build(self, shape):
        self.set_weights(self.starts)

    def call(self, x):
        parts, first = [], 0
        for each in self.trainable_variables:
            size = int(np.prod(each.shape))
            parts.append(ops.sum(x[:, first : first + size] * ops.reshape(each, (1, size)), axis=1))
            first += size
        return sum(parts)[:, None]


class Steps:
    """Steps of an optimizer over the ranks of the strategy."""

    def __init__(self, optimizer, reduction="sum_over_batch_size", **starts):
        layer = Weights(**starts)
        size = sum(each.size for each in layer.starts)
        x = keras.Input((size,))
        self.model = keras.Model(x, layer(x))
        self.layer, self.optimizer = layer, optimizer

        class Output(keras.losses.Loss):
            def call(self, y_true, y_pred):
                return y_pred[:, 0]

        self.model.compile(optimizer, Output(reduction=reduction))

    def step(self, *gradients):
        row = np.concatenate([np.ravel(each) for each in gradients]).astype("f")
        self.model.train_on_batch(np.tile(row, (2, 1)), np.zeros((2, 1)))
        return self.layer.get_weights()


def config():
    optimizer = keras.optimizers.SGD(0.5, momentum=0.06, nesterov=True, weight_decay=0.004)
    assert type(optimizer).from_config(optimizer.get_config()).get_config() == optimizer.get_config()


def single_step():
    """Of the sum of two gradients."""
    steps = Steps(keras.optimizers.SGD(0.5, momentum=0.06), "sum", x=[1.0, 2.0, 3.0, 4.0])
    close(steps.step([1.0, 6.0, 7.0, 2.0])[0], [0, -4, -4, 2])


def weight_decay():
    optimizer = keras.optimizers.SGD(1.0, weight_decay=0.004)
    steps = Steps(optimizer, one=2.0, exclude=3.0, three=4.0)
    optimizer.exclude_from_weight_decay(var_names=["exclude"], var_list=[steps.layer.trainable_variables[2]])
    for _ in range(3):
        found = steps.step(0, 0, 0)
    close(found, [1.9760959, 3.0, 4.0])


def correctness_with_golden():
    steps = Steps(keras.optimizers.SGD(nesterov=True), "sum", x=np.ones(10))
    found = steps.step(np.arange(0.1, 1.1, 0.1))
    for step in range(5):
        close(found[0], 0.998 - 0.002 * np.arange(10) - 0.0002 * step, 5e-4)
        found = steps.step(np.full(10, 0.01))


def clip_norm():
    close(Steps(keras.optimizers.SGD(1.0, clipnorm=1), x=[0.0, 0.0]).step([100, 100])[0], [-(2**0.5) / 2] * 2)


def clip_value():
    close(Steps(keras.optimizers.SGD(1.0, clipvalue=1), x=[0.0, 0.0]).step([100, 100])[0], [-1, -1])


def ema():
    optimizer = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3)
    steps = Steps(optimizer, x=[[3.0, 4.0], [5.0, 6.0]])
    for first in (2.0, 1.0, 1.71):
        close(steps.step(np.ones((2, 2)))[0], [[first, first + 1], [first + 2, first + 3]])


def gradient_accumulation():
    optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=3)
    steps = Steps(optimizer, "sum", x=[[1.0, 2.0], [3.0, 4.0]])
    for expected, iterations in (([1, 2, 3, 4], 0), ([1, 2, 3, 4], 0), ([-1, 0, -1, 0], 1)):
        close(np.ravel(steps.step([1, 1, 2, 2])[0]), expected)
        assert int(ops.convert_to_numpy(optimizer.iterations)) == iterations


# --- tf_distribute_training_test ----------------------------------------------------------------------


def model_fit():
    keras.utils.set_random_seed(1337)
    dense = [layers.Dense(64, activation="relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((100,)), *dense, layers.BatchNormalization(), layers.Dense(16)])
    sgd = keras.optimizers.SGD(0.001, momentum=0.01)
    model.compile(keras.optimizers.LossScaleOptimizer(sgd), "mse", metrics=[keras.metrics.MeanSquaredError()])
    x, y = np.random.random((1000, 100)), np.random.random((1000, 16))  # noqa: NPY002  # of one seed
    rate = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1)
    fit = {"epochs": 2, "callbacks": [rate], "verbose": 0}
    first = model.fit(x, y, batch_size=32, validation_split=0.2, **fit).history
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
    second = model.fit(data, **fit).history
    for history in (first, second):
        alike([history[name] for name in sorted(history)])
        assert history["loss"][1] < history["loss"][0]
    alike(model.get_weights())


if __name__ == "__main__":
    for name in sys.argv[1:] or TESTS:
        compares = name == "correctness_with_fit_and_regularizer"
        with contextlib.nullcontext() if compares else strategy.scope():
            globals()[name]()
        strategy.barrier()
        if strategy.is_chief:
            print(f"passed {name}", flush=True)
    print("all tests passed")
