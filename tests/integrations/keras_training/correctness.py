"""TensorFlow's correctness tests of Keras under a strategy: ``mpistrat run -n 2 correctness.py [CASE ...]``.

Of tf_keras/distribute, the files keras_correctness_test_base, _dnn_, _embedding_model_, _image_model_ and
_stateful_lstm_model_correctness_test, with 20 tests; 19 are here, as 61 cases: of most there are four, with arrays or
a ``tf.data.Dataset``, and with or without validation data in `fit`. A model is trained from given weights in one
process and over ranks, evaluated, predicts, is trained and evaluated again.

The differences:

- A tenth to a quarter of their rows.
- They allow 4e-5, and 1e-3 with a partial last batch, of which they leave out the losses. Here all must agree within
  1e-6, or within three times what plain Keras moves by when the rows of each batch are reversed.
- As theirs, the test of a plain batch norm demands that the ranks give *another* result: each has its own moments.
- ``synchronized=True`` is `SyncBatchNormalization` here.
- A stateful LSTM raises on several ranks, as theirs; the test that trains one they have disabled.
- Graph mode, TPUs and central storage are TensorFlow's own.
"""

import contextlib
import itertools
import sys
import time

import keras
import numpy as np
import pytest
from keras import layers
from parity import BACKEND, difference, strategy

import mpistrat.integrations.keras as distributed

BATCH = 64
RANKS = strategy.num_replicas_in_sync
FOUR = tuple(itertools.product((True, False), (False, True)))
TABLE = {}


def case(name, *args, inputs=FOUR, **more):
    for arrays, validated in inputs:
        kind = f"{'arrays' if arrays else 'dataset'}{' validated' if validated else ''}"
        TABLE[f"{name}, {kind}"] = (*args, arrays, validated), more


# --- data, as theirs ----------------------------------------------------------------------


def numbers(rows, rows_of_evaluation=None):
    def made(random):
        x, held = (random.random((n, 1)).astype("f") for n in (rows, rows_of_evaluation or rows))
        held = held if rows_of_evaluation else x
        return x, 3 * x, held, 3 * held, np.array([[1.0], [2.0], [3.0], [4.0]], "f")

    return made


def words(random, rows=256):
    chances = np.abs(random.normal(size=(2, 19)))
    label = random.integers(0, 2, rows)
    x = np.zeros((rows, 10), "f")
    for row, kind in zip(x, label, strict=True):
        count = random.integers(5, 10)
        row[-count:] = random.choice(19, count, p=chances[kind] / chances[kind].sum())
    return x, label.astype("int32")[:, None]


def sentences(random):
    x, y = words(random)
    return x, y, x, y, x[:BATCH]


def pairs(random):
    (a, kind_a), (b, kind_b) = words(random), words(random)
    x, y = {"words_a": a, "words_b": b}, np.where(kind_a == kind_b, 1, -1).astype("f")
    return x, y, x, y, x


def images(rows, rows_of_evaluation=None):
    def made(random):
        centers = random.normal(size=(10, 28, 28, 3))

        def some(count):
            label = random.integers(0, 10, count)
            x = centers[label] + random.normal(scale=0.1, size=(count, 28, 28, 3))
            return x.astype("f"), label.astype("f")[:, None]

        x, y = some(rows)
        held = some(rows_of_evaluation) if rows_of_evaluation else (x, y)
        return x, y, *held, held[0]

    return made


# --- models --------------------------------------------------------------------------------


def dnn():
    l2 = keras.regularizers.L2(1e-4)
    hidden = [layers.Dense(10, "relu"), layers.Dense(10, "relu", kernel_regularizer=l2), layers.Dense(10, "relu")]
    model = keras.Sequential([keras.Input((1,)), *hidden, layers.Dense(1)])
    return model, keras.optimizers.SGD(0.05), "mse", ["mse"]


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = dnn()[0].layers

    def call(self, x):
        for each in self.inner:
            x = each(x)
        return x


def subclassed():
    return Subclassed(), *dnn()[1:]


def embedding(time_distributed=False):
    x = keras.Input((10,), dtype="int32", name="words")
    y = layers.Embedding(20, 10)(x)
    if time_distributed:
        y = layers.TimeDistributed(layers.Dense(4))(y)
    y = layers.Dense(2, "softmax")(layers.GlobalAveragePooling1D()(y))
    return keras.Model(x, y), keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", ["accuracy"]


def siamese():
    a, b = (keras.Input((10,), dtype="int32", name=f"words_{each}") for each in "ab")
    embed = layers.Embedding(20, 10, embeddings_initializer=keras.initializers.RandomUniform(0, 1))
    average = layers.GlobalAveragePooling1D()
    y = layers.Dot(axes=1, normalize=True)([average(embed(a)), average(embed(b))])
    return keras.Model({"words_a": a, "words_b": b}, y), keras.optimizers.SGD(0.1), "mse", ["mse"]


def cnn(norm=None):
    x = keras.Input((28, 28, 3), name="image")
    y = layers.Conv2D(16, 3, strides=4, kernel_regularizer=keras.regularizers.L2(1e-4))(x)
    if norm == "regular":
        y = layers.BatchNormalization()(y)
    elif norm == "sync":
        y = layers.Add()([distributed.SyncBatchNormalization()(y), distributed.SyncBatchNormalization()(y)])
    y = layers.Dense(10, "softmax")(layers.Flatten()(layers.MaxPooling2D(2)(y)))
    return keras.Model(x, y), keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", ["accuracy"]


# --- training ------------------------------------------------------------------------------


class RateOfBatch(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if BACKEND == "jax":
            self.model.jax_state_sync()
        self.model.optimizer.learning_rate = 0.001 * (batch % 10)


def dataset(x, y=None, repeat=1, size=BATCH):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(x if y is None else (x, y)).repeat(repeat).batch(size)


def reversed_batches(data):
    def one(x):
        return np.concatenate([x[i : i + BATCH][::-1] for i in range(0, len(x), BATCH)])

    return [keras.tree.map_structure(one, each) for each in data[:2]] + list(data[2:])


def results(make, data, arrays, validated, start, epochs, rate_of_batch):
    """Train as their ``fit_eval_and_predict``."""
    x, y, held_x, held_y, asked = data
    model, optimizer, loss, metrics = make()
    model.set_weights(start)
    model.compile(optimizer, loss, metrics=metrics)
    fit = {"epochs": epochs, "shuffle": False, "verbose": 0, "callbacks": [RateOfBatch()] if rate_of_batch else []}
    steps = [-(-len(each) // BATCH) for each in (y, held_y)]
    if arrays:
        fit |= {"x": x, "y": y, "batch_size": BATCH}
        held = {"x": held_x, "y": held_y, "batch_size": BATCH}
        if validated:
            fit["validation_data"] = held_x, held_y
        asked = {"x": asked}
    else:
        fit["steps_per_epoch"] = steps[0]
        if validated:
            fit |= {"validation_data": dataset(held_x, held_y), "validation_steps": min(steps[1], 5)}
        held = {"steps": steps[1]}
        asked = {"x": dataset(asked, size=len(keras.tree.flatten(asked)[0])), "steps": 1}
    found = []
    for _ in range(2):
        more = {} if arrays else {"x": dataset(x, y, epochs)}
        history = model.fit(**fit, **more).history
        found.append([np.array(history[name]) for name in sorted(history)])
        if not validated:
            more = {} if arrays else {"x": dataset(held_x, held_y)}
            found[-1].append(np.array(model.evaluate(**held, **more, verbose=0)))
        found.append([np.asarray(each, "f8") for each in model.get_weights()])
        if len(found) == 2:
            found.append(keras.tree.flatten(model.predict(**asked, verbose=0)))
    return found


def compare(make, data, arrays, validated, epochs=2, rate_of_batch=False, differs=False):
    """The largest difference of the logs, weights and predictions, and whether it is as it should be."""
    keras.utils.set_random_seed(1337)
    start = make()[0].get_weights()
    data = data(np.random.default_rng(1337))
    options = arrays, validated, start, epochs, rate_of_batch
    plain = results(make, data, *options)
    with strategy.scope():
        mine = results(make, data, *options)
    found = max(itertools.starmap(difference, zip(plain, mine, strict=True)))
    if differs and RANKS > 1:
        return found, found > 1e-3
    bound = 1e-6
    if found > bound:
        moved = results(make, reversed_batches(data), *options)
        bound = max(bound, 3 * max(itertools.starmap(difference, zip(plain[:2], moved[:2], strict=True))))
    return found, found <= bound


for kind, make in (("dnn", dnn), ("subclassed dnn", subclassed)):
    case(kind, make, numbers(1024))
    case(f"{kind}, partial evaluation", make, numbers(1024, 1000))
    case(f"{kind}, partial", make, numbers(1000, 1000), epochs=1)
    case(f"{kind}, rate of batch", make, numbers(1024), inputs=[(True, True)], rate_of_batch=True)
case("embedding", embedding, sentences)
case("embedding, time distributed", lambda: embedding(True), sentences)
case("siamese", siamese, pairs)
case("cnn", cnn, images(320))
case("cnn, batch norm", lambda: cnn("regular"), images(320), differs=True)
case("cnn, sync batch norm", lambda: cnn("sync"), images(320))
case("cnn, partial evaluation", cnn, images(320, 250), epochs=1)
case("cnn, batch norm, partial evaluation", lambda: cnn("regular"), images(320, 250), differs=True)


# --- tests that compare with known values ---------------------------------------------------------


def metric():
    """Of an identity, whose accuracy is 1."""
    x = np.random.default_rng(0).integers(0, 2, (1000, 1)).astype("f")
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=[keras.metrics.BinaryAccuracy()])
    history = model.fit(dataset(x, x, 2), epochs=2, steps_per_epoch=10, verbose=0).history
    assert history["binary_accuracy"] == [1, 1]


def metrics_of_evaluation():
    first = layers.Dense(3, "relu", kernel_initializer="ones")
    model = keras.Sequential([keras.Input((4,)), first, layers.Dense(1, "sigmoid", kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.001), "mae", metrics=["accuracy", keras.metrics.BinaryAccuracy()])
    for value in (1, 0):
        data = dataset(np.ones((100, 4), "f"), np.full((100, 1), value, "f"), None, 4)
        assert [float(each) for each in model.evaluate(data, steps=10, verbose=0)[1:]] == [value, value]


def stateful_lstm():
    x = keras.Input((10,), batch_size=BATCH, dtype="int32")
    y = layers.LSTM(4, stateful=True)(layers.Embedding(20, 10)(x))
    model = keras.Model(x, layers.Dense(2, "softmax")(y))
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    x, y, *_ = sentences(np.random.default_rng(0))
    for call in (model.fit, model.evaluate, model.predict):
        with contextlib.nullcontext() if RANKS == 1 else pytest.raises(ValueError, match="is stateful"):
            call(x, *(() if call == model.predict else (y,)), batch_size=BATCH, verbose=0)


if __name__ == "__main__":
    asked = sys.argv[1:]
    for name, (args, more) in TABLE.items():
        if asked and name not in asked:
            continue
        start = time.monotonic()
        found, right = compare(*args, **more)
        if strategy.is_chief:
            print(f"case {name}: {'ok' if right else 'OFF'} {found:.1e} {time.monotonic() - start:.1f} s", flush=True)
    for function in (metric, metrics_of_evaluation, stateful_lstm):
        if asked and function.__name__ not in asked:
            continue
        with strategy.scope():
            function()
        if strategy.is_chief:
            print(f"case {function.__name__}: ok", flush=True)
