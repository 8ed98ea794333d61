"""Horovod's tests of Keras, on Keras 3 and the backend of KERAS_BACKEND: ``horovod_keras.py FOLDER [TEST ...]``.

Of Horovod's files in test/parallel, with the differences:

- test_keras.py (7 tests; TensorFlow 1): 6 are here. ``load_model`` leaves the class of an optimizer as it is, and takes
  classes, not functions, as custom objects: Keras 3 does not, either.
- test_tensorflow_keras.py (10; TensorFlow 1): 9 are here, 6 of which are those of test_keras.py.
- test_tensorflow2_keras.py (13, with 2 parameters of two tests): 11 are here. Keras 3 has no legacy optimizers. Passes
  are counted by ``gradient_accumulation_steps`` of Keras, so ``iterations`` counts changes of the weights.
- test_tensorflow2_keras_process_sets.py (1): it is here.
- Three are elastic, which is left out everywhere.
"""

import pathlib
import sys

import keras
import mpistrat.integrations.hvd.tensorflow.keras as hvd
import numpy as np
from keras import layers, ops

from mpistrat.runtime.agreement.operation import MismatchError

BACKEND = keras.backend.backend()
hvd.init()
RANK, RANKS = hvd.rank(), hvd.size()
folder = pathlib.Path(hvd.broadcast_object(sys.argv[1], 0))
TESTS = {}


def test(function):
    TESTS[function.__name__] = function
    return function


def everywhere(value):
    return hvd.allgather_object(value)


def close(one, other, tolerance=1e-6):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(numpy(a), numpy(b), atol=tolerance, rtol=tolerance)


def numpy(value):
    return np.asarray(ops.convert_to_numpy(getattr(value, "value", value)))


def alike(variables):
    """Fail unless all ranks have equal values."""
    mine = [numpy(each) for each in variables]
    for theirs in everywhere(mine):
        for one, other in zip(mine, theirs, strict=True):
            assert np.array_equal(one, other)


def refused(kind, text, function):
    """Fail unless a function raises such an error on every rank."""
    try:
        function()
    except kind as error:
        found = text in str(error), repr(error)
    else:
        found = False, "no error"
    assert all(right for right, _ in everywhere(found)), everywhere(found)


def update(optimizer, gradients, variables):
    """A step of an optimizer, as in a loop of one's own."""
    if not optimizer.built:
        optimizer.build(variables)
    if BACKEND == "jax":
        import jax

        state = [each.value for each in optimizer.variables]
        compiled = jax.jit(optimizer.stateless_apply)
        new, state = compiled(state, gradients, [each.value for each in variables])
        for each, value in zip([*variables, *optimizer.variables], [*new, *state], strict=True):
            each.assign(value)
    elif BACKEND == "torch":
        import torch

        with torch.no_grad():
            optimizer.apply(gradients, variables)
    else:
        import tensorflow as tf

        tf.function(lambda: optimizer.apply(gradients, variables))()


class Adds(keras.optimizers.Optimizer):
    """Horovod's TestingOptimizer: it adds the gradient."""

    def __init__(self, learning_rate=0.1, **more):
        super().__init__(learning_rate, **more)

    def update_step(self, gradient, variable, learning_rate):
        self.assign_add(variable, gradient)


class Keeps(Adds):
    """It sets the variable to the gradient."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign(variable, gradient)


@keras.saving.register_keras_serializable("tests")
class Registered(keras.optimizers.RMSprop):
    pass


class Custom(keras.optimizers.RMSprop):
    pass


random = np.random.default_rng(RANK)


def repeated(optimizer=None, seed=1, **more):
    """The model of most tests, and rows of this rank for it."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [keras.Input((3,)), layers.Dense(2), layers.RepeatVector(3), layers.TimeDistributed(layers.Dense(3))]
    )
    if optimizer is not None:
        model.compile(optimizer, "mse", metrics=["categorical_accuracy"], **more)
    return model, (random.random((1, 3)), random.random((1, 3, 3)))


def batches(x, y):
    while True:
        yield x, y


# --- test_keras.py and test_tensorflow_keras.py ----------------------------------------------


@test
def sparse_as_dense(passes=1, steps=1):
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.RMSprop(0.0001), sparse_as_dense=True, backward_passes_per_step=passes
    )
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((10,), dtype="int32"), layers.Embedding(1000, 64)])
    model.compile(optimizer, "mse")
    x, y = random.integers(1000, size=(32, 10)), random.random((32, 10, 64))
    for _ in range(steps):
        model.train_on_batch(x, y)
    alike(model.variables)
    return int(numpy(optimizer.iterations))


def loads(optimizer, **more):
    model, (x, y) = repeated(hvd.DistributedOptimizer(optimizer))
    model.train_on_batch(x, y)
    file = folder / f"{type(optimizer).__name__}.keras"
    if RANK == 0:
        model.save(file)
    hvd.barrier()
    loaded = hvd.load_model(file, **more)
    assert type(loaded.optimizer).__name__ == type(optimizer).__name__
    close(optimizer.variables, loaded.optimizer.variables, 0)
    loaded.train_on_batch(x, y)
    model.train_on_batch(x, y)
    alike(loaded.variables)
    close(model.variables, loaded.variables)
    if not more:
        assert type(keras.saving.load_model(file).optimizer) is type(optimizer)


@test
def load_model():
    loads(keras.optimizers.RMSprop(0.0001))
    loads(Registered(0.0001))


@test
def load_model_custom_optimizers():
    loads(Custom(0.0001), custom_optimizers=[Custom])


@test
def load_model_custom_objects():
    loads(Custom(0.0001), custom_objects={"Custom": Custom})


@test
def load_model_broadcast():
    def made():
        optimizer = keras.optimizers.SGD(0.01 * RANKS, momentum=0.9)
        return repeated(hvd.DistributedOptimizer(optimizer), seed=RANK)

    model, (x, y) = made()
    model.train_on_batch(x, y)
    file = folder / "broadcast.keras"
    if RANK == 0:
        model.save(file)
    model = hvd.load_model(file) if RANK == 0 else made()[0]
    assert len(model.optimizer.variables) == (6 if RANK == 0 else 2)  # Keras builds it in the first step
    calls = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(batches(x, y), steps_per_epoch=10, callbacks=calls, epochs=0, verbose=0, initial_epoch=1)
    assert len(model.optimizer.variables) == 6
    alike([*model.variables, *model.optimizer.variables])


@test
def from_config():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam())
    config = optimizer.get_config()
    assert optimizer.from_config(config).get_config() == config
    assert type(optimizer).from_config(config).get_config() == config


@test
def train_model(passes=1):
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.RMSprop(0.0001), backward_passes_per_step=passes, average_aggregated_gradients=True
    )
    model, (x, y) = repeated(optimizer, seed=RANK)
    calls = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(batches(x, y), steps_per_epoch=10, callbacks=calls, epochs=1, verbose=0)
    alike([*model.variables, *optimizer.variables])


@test
def train_model_with_gradient_aggregation():
    train_model(2)


# --- test_tensorflow2_keras.py -----------------------------------------------------------------


@test
def train_model_lr_schedule():
    rate = 0.1 * RANKS
    keras.utils.set_random_seed(RANK)
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2), layers.RepeatVector(3), layers.ReLU(threshold=0.5)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse", metrics=["categorical_accuracy"])
    x, y = random.random((10, 3)), random.random((10, 3, 2))
    rates = []

    class Store(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            rates.append(logs["lr"])

    schedule = hvd.callbacks.LearningRateScheduleCallback
    calls = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=5, verbose=1),
        schedule(initial_lr=rate, multiplier=1e-1, start_epoch=5, end_epoch=10),
        schedule(initial_lr=rate, multiplier=1e-2, start_epoch=10, end_epoch=15),
        schedule(initial_lr=rate, multiplier=lambda epoch: epoch, start_epoch=15, end_epoch=20),
        Store(),
    ]
    history = model.fit(x, y, batch_size=2, callbacks=calls, epochs=20, verbose=0).history
    warm = [rate / RANKS * ((epoch + 1) * (RANKS - 1) / 5 + 1) for epoch in range(5)]
    decay = [
        rate * factor ** (epoch - 5 - 5 * i)
        for i, factor in enumerate((1e-1, 1e-2))
        for epoch in range(5 + 5 * i, 10 + 5 * i)
    ]
    np.testing.assert_allclose(rates, [*warm, *decay, *[rate * epoch for epoch in range(15, 20)]], rtol=1e-5)
    alike([np.array(history[name]) for name in ("loss", "categorical_accuracy")])
    alike(model.variables)


@test
def sparse_as_dense_with_grad_aggregation():
    assert sparse_as_dense(2, 3) == 1  # and one pass waits


@test
def grad_aggregation_with_inf_grad():
    """An infinite gradient is forgotten after its change of the weights."""
    optimizer = hvd.DistributedOptimizer(Keeps(), backward_passes_per_step=2, sparse_as_dense=True)
    x = keras.Variable(0.0)
    for gradient in (np.inf, 1.0, 1.0, 1.0):
        update(optimizer, [ops.convert_to_tensor(gradient)], [x])
        if int(numpy(optimizer.iterations)) == 1:
            assert not np.isfinite(numpy(x))
    assert numpy(x) == 2


def gradients(factor, rows=True):
    """Horovod's: of ``x - factor * y[0]`` by x and by y, whose gradient is of some rows on TensorFlow."""
    if BACKEND != "tensorflow" or not rows:
        return [ops.convert_to_tensor(each) for each in (np.ones(1, "f"), np.array([-factor, 0], "f"))]
    import tensorflow as tf

    return [tf.ones(1), tf.IndexedSlices(tf.constant([-factor]), tf.constant([0]), tf.constant([2]))]


def aggregated(average, local=0, **more):
    made = [[keras.Variable(np.zeros(1, "f")), keras.Variable(np.array([1, 2], "f"))] for _ in range(8)]
    layer = keras.layers.Layer()
    layer._trainable_variables = [each for pair in made[:local] for each in pair]
    if local:
        more["local_layers"] = layer
    optimizer = hvd.PartialDistributedOptimizer(
        Adds(), backward_passes_per_step=4, average_aggregated_gradients=average, **more
    )
    for step in range(10):
        given = [each for _ in made for each in gradients(RANK + 1.0, rows=False)]
        update(optimizer, given, [each for pair in made for each in pair])
        moved = (step + 1) // 4 * (1 if average else 4)
        mean = (RANKS + 1) / 2
        for i, (x, y) in enumerate(made):
            if i < local:
                close([x, y], [[moved / RANKS], [1 - moved * (RANK + 1) / RANKS, 2]], 1e-5)
            else:
                close([x, y], [[moved], [1 - moved * mean, 2]], 1e-5)
        assert int(numpy(optimizer.iterations)) == (step + 1) // 4


@test
def gradient_aggregation_average():
    aggregated(True, sparse_as_dense=True)


@test
def gradient_aggregation_sum():
    aggregated(False, sparse_as_dense=True)


@test
def gradient_aggregation_with_local_vars_average():
    aggregated(True, 4)


@test
def gradient_aggregation_with_local_vars_sum():
    aggregated(False, 4)


@test
def partial_distributed_optimizer():
    for count in range(3):
        model, _ = repeated()
        start = [np.full(each.shape, RANK, "f") for each in model.get_weights()]
        model.set_weights(start)
        optimizer = hvd.PartialDistributedOptimizer(Adds(), local_layers=model.layers[:count])
        own = [np.full(each.shape, RANK + 1, "f") for each in start]
        update(optimizer, [ops.convert_to_tensor(each) for each in own], model.trainable_variables)
        local = len([each for layer in model.layers[:count] for each in layer.trainable_variables])
        moved = [after - before for after, before in zip(model.get_weights(), start, strict=True)]
        close([RANKS * each for each in moved[:local]], own[:local])
        close(moved[local:], [np.full(each.shape, (RANKS + 1) / 2) for each in own[local:]])


@test
def broadcast_global_variables_callback_with_local_vars():
    root = RANKS - 1
    constant = keras.initializers.Constant(RANK)
    dense = [layers.Dense(3, kernel_initializer=constant, bias_initializer=constant) for _ in range(4)]
    model = keras.Sequential([keras.Input((3,)), *dense])
    for each in dense:
        each.trainable = False
    model.compile("rmsprop", "mse")
    call = hvd.callbacks.BroadcastGlobalVariablesCallback
    model.fit(
        random.random((1, 3)),
        random.random((1, 3)),
        callbacks=[call(root_rank=root, local_variables=dense[0].variables)],
        verbose=0,
    )
    for each in dense:
        close(each.variables, [np.full(v.shape, RANK if each is dense[0] else root) for v in each.variables])


# --- test_tensorflow2_keras_process_sets.py --------------------------------------------------------


@test
def process_set_optimizer():
    evens = hvd.add_process_set([each for each in range(RANKS) if each % 2 == 0])
    optimizer = hvd.DistributedOptimizer(Adds(), process_set=evens)
    x = keras.Variable(np.zeros(1, "f"))
    update(optimizer, [ops.convert_to_tensor(np.array([RANK], "f"))], [x])
    close([x], [[np.mean(evens.ranks) if RANK % 2 == 0 else RANK]])
    hvd.remove_process_set(evens)


# --- not in Horovod's -----------------------------------------------------------------------------

ROWS = 24
X = np.random.default_rng(5).normal(size=(ROWS, 4)).astype("f")
Y = X.sum(1, keepdims=True)


def trained(optimizer, x, y, calls=(), **compiled):
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(5, activation="tanh"), layers.Dense(1)])
    model.compile(optimizer, "mse", metrics=["mae"], **compiled)
    history = model.fit(x, y, batch_size=len(x) // 2, epochs=3, shuffle=False, callbacks=calls, verbose=0).history
    return model, history


def rows_of_rank():
    """Of each half of the rows, those of this rank."""
    part = ROWS // 2 // RANKS
    return np.concatenate([np.arange(part) + start + RANK * part for start in (0, ROWS // 2)])


@test
def as_one_process():
    """Equal parts on the ranks give the weights and the logs of one process with the whole batch."""
    mine = rows_of_rank()
    for make in (
        lambda: keras.optimizers.Adam(0.01),
        lambda: keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.1),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=8.0),
    ):
        plain, history = trained(make(), X, Y)
        calls = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
        more = {"jit_compile": True} if BACKEND == "tensorflow" else {}
        model, own = trained(hvd.DistributedOptimizer(make()), X[mine], Y[mine], calls, **more)
        close(model.get_weights(), plain.get_weights())
        close([own[name] for name in sorted(own)], [history[name] for name in sorted(own)], 1e-5)
        alike(model.variables)


@test
def sums_and_float16():
    mine = rows_of_rank()
    plain, _ = trained(keras.optimizers.SGD(0.06), X, Y)
    summed, _ = trained(hvd.DistributedOptimizer(keras.optimizers.SGD(0.06 / RANKS), op=hvd.Sum), X[mine], Y[mine])
    close(summed.get_weights(), plain.get_weights())
    half = hvd.DistributedOptimizer(keras.optimizers.SGD(0.06), compression=hvd.Compression.fp16)
    model, _ = trained(half, X[mine], Y[mine])
    close(model.get_weights(), plain.get_weights(), 1e-3)
    assert RANKS == 1 or not np.array_equal(model.get_weights()[0], plain.get_weights()[0])
    alike(model.variables)


@test
def momentum_correction():
    """Of Goyal et al. 2017: the momentum of a step in which the rate changes has the factor new / old."""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5))
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    model.compile(optimizer, lambda y, prediction: prediction)  # whose gradient by the weight is x
    call = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 1 if epoch == 0 else 0.1)
    model.fit(np.ones((2, 1)), np.ones((2, 1)), batch_size=1, epochs=2, callbacks=[call], verbose=0)
    weight, speed, old = 1.0, 0.0, 0.1
    for rate in (0.1, 0.1, 0.01, 0.01):
        speed = 0.5 * rate / old * speed - rate
        weight, old = weight + speed, rate
    close(model.get_weights(), [[[weight]]])


@test
def overflow_on_one_rank():
    """The outermost optimizer combines, so that all ranks see it and none makes the step."""
    inner = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0)
    model, _ = repeated(optimizer)
    before = model.get_weights()
    x, y = np.ones((1, 3)), np.full((1, 3, 3), 1e38 if RANK == RANKS - 1 else 1.0)
    model.train_on_batch(x, y)
    close(model.get_weights(), before, 0)
    assert everywhere(float(numpy(optimizer.dynamic_scale))) == [512.0] * RANKS
    model.train_on_batch(x, np.ones((1, 3, 3)))
    assert not np.array_equal(model.get_weights()[0], before[0])


@test
def global_variables():
    models = [repeated(keras.optimizers.Adam(), seed=RANK)[0] for _ in range(2)]
    for number, each in enumerate(models):  # as of a rank that has made a model more
        each.name = f"repeated_{9 + number + RANK}"
    for each, (_, (x, y)) in zip(models, [repeated(), repeated()], strict=True):
        each.train_on_batch(x, y)
    hvd.broadcast_global_variables(RANKS - 1)
    for each in models:
        alike([*each.variables, *each.optimizer.variables])


@test
def wrong_arguments():
    refused(ValueError, "only supports Average and Sum", lambda: hvd.DistributedOptimizer(Adds(), op=hvd.Max))
    refused(ValueError, "must be layers", lambda: hvd.PartialDistributedOptimizer(Adds(), local_layers=[1]))
    twice = Adds(gradient_accumulation_steps=2)
    refused(ValueError, "needs a new", lambda: hvd.DistributedOptimizer(twice, backward_passes_per_step=2))
    schedule = hvd.callbacks.LearningRateScheduleCallback
    refused(ValueError, "is required", lambda: schedule(None, 1.0))
    model, (x, y) = repeated(Adds())
    call = schedule(0.1, 1.0, staircase=False)
    refused(ValueError, "needs steps_per_epoch", lambda: model.fit(batches(x, y), callbacks=[call], verbose=0))
    refused(AttributeError, "ElasticLoop", lambda: hvd.elastic)


@test
def other_models():
    """Each rank gets the error that names both."""
    if RANKS == 1:
        return
    x = keras.Variable(np.zeros(2 + RANK, "f"))
    optimizer = hvd.DistributedOptimizer(Adds())
    gradient = ops.ones(2 + RANK)
    kind, text = (MismatchError, "shape") if BACKEND == "torch" else (Exception, "MismatchError")
    try:
        update(optimizer, [gradient], [x])
    except kind as error:
        found = text in str(error) + type(error).__name__
    else:
        found = False
    assert all(everywhere(found)), found
    average = hvd.callbacks.MetricAverageCallback()
    refused(MismatchError, "named loss", lambda: average.on_epoch_end(0, {"acc" if RANK else "loss": 1.0}))
    model, _ = repeated()
    if RANK:
        model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    broadcast.set_model(model)
    refused(MismatchError, "do not fit together", broadcast.on_train_begin)


def failure_of_one_rank():
    """Not among the tests: it ends the job."""

    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if RANK == RANKS - 1:
                raise RuntimeError("a failure of one rank")

    model, (x, y) = repeated(hvd.DistributedOptimizer(Adds()))
    model.fit(batches(x, y), steps_per_epoch=10, callbacks=[Fails()], verbose=0)


if __name__ == "__main__":
    asked = sys.argv[2:]
    if asked == ["failure_of_one_rank"]:
        failure_of_one_rank()
    for name, function in TESTS.items():
        if asked and name not in asked:
            continue
        function()
        hvd.barrier()
        if RANK == 0:
            print(f"passed {name}", flush=True)
    print("all tests passed")
