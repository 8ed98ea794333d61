"""Rows of models, optimizers, losses and data: the same training by plain Keras and by the ranks of a strategy.

    mpistrat run -n 2 tests/integrations/keras_training/parity.py [ROW ...]

Each row prints its name, the largest difference of a weight, of a log and of a prediction, and whether it is in bounds.
"""

import sys
import time

import keras
import numpy as np
from keras import layers, ops

import mpistrat
import mpistrat.integrations.keras as distributed
from mpistrat.data import Dataset

BACKEND = keras.backend.backend()
strategy = mpistrat.MultiWorkerMirroredStrategy()
RANKS = strategy.num_replicas_in_sync
random = np.random.default_rng(0)
ROWS = 77
X = random.normal(size=(ROWS, 6)).astype("f")
Y = (X[:, :1] * 2 + X[:, 1:2] + 0.1 * random.normal(size=(ROWS, 1))).astype("f")
CLASS = (X[:, 0] > 0).astype("int32") + (X[:, 1] > 0.5).astype("int32")
TOKENS = random.integers(1, 12, size=(ROWS, 7)) * (np.arange(7) < random.integers(1, 8, size=(ROWS, 1)))
TOKENS = TOKENS.astype("int32")
NEXT = ((TOKENS * 5 + 1) % 12).astype("int32")
IMAGES = random.normal(size=(ROWS, 6, 6, 2)).astype("f") * [1, 3] + [0.5, 0]
WEIGHTS = random.uniform(0.1, 3, size=ROWS).astype("f")
WEIGHTS[::5] = 0
TABLE = {}


class Row:
    """What a row compiles, and how it fits."""

    def __init__(self, make, optimizer="sgd", loss="mse", data=(X, Y), fit=None, **more):
        self.make, self.optimizer, self.loss, self.data = make, optimizer, loss, data
        self.fit = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0, **(fit or {})}
        self.backends = more.pop("backends", ("torch", "jax", "tensorflow"))
        self.tolerance = more.pop("tolerance", 1e-6)
        self.predicts = more.pop("predicts", True)
        self.looks = more.pop("looks", True)
        self.quick = more.pop("quick", False)
        self.compile = more

    def train(self, order=None):
        """Train a model from one seed, and return its weights, logs and predictions."""
        keras.utils.set_random_seed(3)
        model = self.make()
        optimizer = self.optimizer() if callable(self.optimizer) else self.optimizer
        loss = self.loss() if callable(self.loss) and not isinstance(self.loss, keras.Loss) else self.loss
        made = {name: value() if callable(value) else value for name, value in self.compile.items()}
        model.compile(optimizer, loss, **made)
        data = self.data() if callable(self.data) else self.data
        fit = {name: value() if callable(value) else value for name, value in self.fit.items()}
        if order is not None:
            data = tuple(keras.tree.map_structure(lambda each: each[order], each) for each in data)
            fit = {name: value[order] if name == "sample_weight" else value for name, value in fit.items()}
        if isinstance(data, tuple):
            history = model.fit(*data, **fit).history
        else:
            fit.pop("batch_size")
            history = model.fit(data, **fit).history
        # Keras' losses of single outputs count a batch of unknown size as one row, in TensorFlow.
        names = [name for name in sorted(history) if BACKEND != "tensorflow" or not name.endswith("_loss")]
        logs = [np.ravel(history[name]) for name in names]
        if self.looks:
            found = model.evaluate(*self.data[:2], batch_size=16, verbose=0, return_dict=True)
            names = [name for name in sorted(found) if BACKEND != "tensorflow" or "_loss" not in name]
            logs.append(np.array([found[name] for name in names]))
        outputs = model.predict(self.data[0], batch_size=16, verbose=0) if self.predicts else []
        return [np.asarray(each, "f8") for each in model.get_weights()], logs, keras.tree.flatten(outputs)


def difference(one, two):
    assert [np.shape(each) for each in one] == [np.shape(each) for each in two], (one, two)
    return max([float(np.max(np.abs(a - b), initial=0)) for a, b in zip(one, two, strict=True)], default=0.0)


def spread(row, plain):
    """How far plain Keras moves when the rows of each batch come in another order."""
    size = row.fit["batch_size"]
    order = np.concatenate([np.arange(i, min(i + size, ROWS))[::-1] for i in range(0, ROWS, size)])
    return difference(plain[0], row.train(order)[0])


def run(name):
    row = TABLE[name]
    plain = row.train()
    with strategy.scope():
        mine = row.train()
    found = [difference(*pair) for pair in zip(plain, mine, strict=True)]
    first = strategy.extended.engine.topology.broadcast_object([mine[0], mine[1]])
    found.append(max(difference(first[0], mine[0]), difference(first[1], mine[1])))  # of the ranks
    bounds = np.array([1, 10, 10, 0]) * row.tolerance
    if not np.all(found <= bounds) and isinstance(row.data, tuple) and not row.fit.get("validation_split"):
        bounds = np.array([1, 20, 20, 0]) * max(row.tolerance, 3 * spread(row, plain))
    return found, bool(np.all(found <= bounds))


def row(name, *args, **more):
    TABLE[name] = Row(*args, **more)


# --- models ----------------------------------------------------------------------------


def dense(**more):
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="tanh", kernel_regularizer="l2", **more),
            layers.Dense(1),
        ]
    )


def classes():
    return keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(3)])


def tokens(masked=True):
    x = keras.Input((7,), dtype="int32")
    y = layers.Embedding(12, 5, mask_zero=masked)(x)
    y = layers.LSTM(6, return_sequences=True)(y)
    return keras.Model(x, layers.Dense(12)(y))


def embedded():
    return keras.Sequential(
        [
            keras.Input((7,), dtype="int32"),
            layers.Embedding(12, 4),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1),
        ]
    )


def outputs():
    x = keras.Input((6,))
    y = layers.Dense(8, activation="tanh")(x)
    return keras.Model(x, {"a": layers.Dense(1, name="a")(y), "b": layers.Dense(3, name="b")(y)})


def images(norm):
    x = keras.Input((6, 6, 2))
    y = layers.Conv2D(4, 3)(x)
    y = layers.Activation("relu")(norm()(y))
    return keras.Model(x, layers.Dense(1)(layers.GlobalAveragePooling2D()(y)))


class Own(keras.Model):
    """A subclass, with a loss of its own."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(8, activation="tanh")
        self.outer = layers.Dense(1)

    def call(self, x):
        y = self.inner(x)
        self.add_loss(0.01 * ops.mean(ops.square(y)))
        return self.outer(y)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.abs(y - y_pred)) + sum(self.losses)


class OwnStep(keras.Model):
    """A step of its own, for each backend."""

    def train_step(self, *args):
        if BACKEND == "jax":
            import jax

            state, (x, y) = args

            def loss_of(weights, fixed):
                out, fixed = self.stateless_call(weights, fixed, x, training=True)
                return ops.mean(ops.square(out - y)), fixed

            (loss, fixed), gradients = jax.value_and_grad(loss_of, has_aux=True)(state[0], state[1])
            weights, optimizer = self.optimizer.stateless_apply(state[2], gradients, state[0])
            return {"own": loss}, (weights, fixed, optimizer, state[3])
        ((x, y),) = args
        weights = self.trainable_variables
        if BACKEND == "torch":
            import torch

            self.zero_grad()
            loss = ops.mean(ops.square(self(x, training=True) - y))
            loss.backward()
            with torch.no_grad():
                self.optimizer.apply([each.value.grad for each in weights], weights)
        else:
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(self(x, training=True) - y))
            self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"own": loss}


def own_step():
    x = keras.Input((6,))
    return OwnStep(x, layers.Dense(1)(layers.Dense(8, activation="tanh")(x)))


def frozen():
    model = dense()
    model.layers[0].trainable = False
    return model


def typed(policy):
    def make():
        keras.config.set_dtype_policy(policy)
        try:
            return keras.Sequential(
                [keras.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(1, dtype="float32")]
            )
        finally:
            keras.config.set_dtype_policy("float32")

    return make


# --- data ------------------------------------------------------------------------------


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 5

    def __getitem__(self, i):
        return X[i * 16 : i * 16 + 16], Y[i * 16 : i * 16 + 16]


def generated():
    while True:
        for i in range(5):
            yield X[i * 16 : i * 16 + 16], Y[i * 16 : i * 16 + 16]


def loader():
    import torch

    arrays = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    return torch.utils.data.DataLoader(arrays, batch_size=16)


def read(make):
    """A dataset of mpistrat in a scope; outside, its batches for plain Keras."""

    def data():
        dataset = make()
        return dataset if mpistrat.has_strategy() else (batch for _ in range(9) for batch in dataset)

    return data


def once(steps):
    """The number of steps for plain Keras, which does not know it."""
    return {"steps_per_epoch": lambda: None if mpistrat.has_strategy() else steps}


def by_function(known):
    """Batches of a function for each rank, of which the last ones are empty on some ranks."""

    def make():
        rows, size = Dataset.from_arrays((X[:49] if known else IMAGES[:49], Y[:49])), 16 // RANKS

        def of_pipeline(context):
            own = rows.shard(context.num_input_pipelines, context.input_pipeline_id)
            return (own if known else own.filter(lambda x, y: True)).batch(size)

        if not mpistrat.has_strategy():
            return rows.batch(size * RANKS)
        return strategy.distribute_datasets_from_function(of_pipeline)

    return make


def tf_data():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)


# --- the table -------------------------------------------------------------------------

optimizers, losses, metrics = keras.optimizers, keras.losses, keras.metrics
row("dense", dense, lambda: optimizers.Adam(0.01), metrics=lambda: ["mae", metrics.R2Score()], quick=True)
for kind in ("SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl", "Lion", "Lamb", "Adafactor"):
    row(kind, dense, lambda kind=kind: getattr(optimizers, kind)(0.01))
row("momentum", dense, lambda: optimizers.SGD(0.01, momentum=0.9, nesterov=True, clipnorm=0.1))
row("global clip", dense, lambda: optimizers.AdamW(0.01, weight_decay=0.01, global_clipnorm=0.1))
row("clip value", dense, lambda: optimizers.SGD(0.05, clipvalue=0.05))
row("average", dense, lambda: optimizers.SGD(0.01, use_ema=True, ema_momentum=0.9))
row("average often", dense, lambda: optimizers.SGD(0.01, use_ema=True, ema_overwrite_frequency=3))
row("accumulate", dense, lambda: optimizers.Adam(0.01, gradient_accumulation_steps=3), quick=True)
row("scale", dense, lambda: optimizers.SGD(0.01, loss_scale_factor=128.0))
row("schedule", dense, lambda: optimizers.SGD(optimizers.schedules.ExponentialDecay(0.05, 3, 0.5)))
row("sum", dense, lambda: optimizers.SGD(0.001), lambda: losses.MeanSquaredError(reduction="sum"))
weighted = {"sample_weight": WEIGHTS}
row("weights", dense, fit=weighted, weighted_metrics=lambda: ["mae"])
row(
    "mean of weights",
    dense,
    loss=lambda: losses.MeanSquaredError(reduction="mean_with_sample_weight"),
    fit=weighted,
    quick=True,
)
row(
    "weights and sum",
    dense,
    lambda: optimizers.SGD(0.001),
    lambda: losses.Huber(reduction="sum"),
    fit=weighted,
)
crossentropy = losses.SparseCategoricalCrossentropy
row(
    "classes",
    classes,
    lambda: optimizers.Adam(0.01),
    lambda: crossentropy(from_logits=True),
    (X, CLASS),
    {"class_weight": lambda: {0: 1.0, 1: 3.0, 2: 0.5}},
    metrics=lambda: ["accuracy"],
    quick=True,
)
row(
    "mask",
    tokens,
    lambda: optimizers.Adam(0.01),
    lambda: crossentropy(from_logits=True),
    (TOKENS, NEXT),
    metrics=lambda: ["accuracy"],
    quick=True,
)
row(
    "mask and sum",
    tokens,
    lambda: optimizers.SGD(0.001),
    lambda: crossentropy(True, reduction="sum"),
    (TOKENS, NEXT),
)
row(
    "mask and weights",
    tokens,
    lambda: optimizers.SGD(0.1),
    lambda: crossentropy(True, reduction="mean_with_sample_weight"),
    (TOKENS, NEXT),
    {"sample_weight": np.outer(WEIGHTS, np.linspace(0.5, 2, 7)).astype("f")},
)
row("embedding", embedded, lambda: optimizers.Adam(0.01), data=(TOKENS, Y), quick=True)
row("embedding RMSprop", embedded, lambda: optimizers.RMSprop(0.01), data=(TOKENS, Y))
row("embedding clip", embedded, lambda: optimizers.Adagrad(0.1, global_clipnorm=0.1), data=(TOKENS, Y))
row(
    "outputs",
    outputs,
    lambda: optimizers.Adam(0.01),
    lambda: {"a": losses.MeanSquaredError(reduction="sum"), "b": crossentropy(True)},
    (X, {"a": Y, "b": CLASS}),
    loss_weights=lambda: {"a": 0.01, "b": 2.0},
    metrics=lambda: {"a": ["mae"], "b": ["accuracy"]},
)
row(
    "AUC",
    lambda: dense(),
    loss="mse",
    metrics=lambda: [metrics.AUC(from_logits=True)],
    data=(X, (Y > 0).astype("f")),
)
row("sync norm", lambda: images(distributed.SyncBatchNormalization), data=(IMAGES, Y), quick=True)
# A scale with which no sum of gradients overflows: a rank's part of it may fit where that of the batch does not.
scaled = lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.01), initial_scale=256.0)  # noqa: E731
row("float16", typed("mixed_float16"), scaled, tolerance=1e-3, quick=True)
row("bfloat16", typed("mixed_bfloat16"), lambda: optimizers.SGD(0.01), tolerance=1e-3)
row("own loss", Own, lambda: optimizers.Adam(0.01), None)
row("own step", own_step, lambda: optimizers.Adam(0.01), looks=False, quick=True)
row("frozen", frozen, lambda: optimizers.Adam(0.01))
row("eager", dense, run_eagerly=True)
row("not compiled", dense, jit_compile=False, backends=("jax",))
row("several steps", dense, steps_per_execution=2, backends=("jax", "tensorflow"))
row("split", dense, fit={"validation_split": 0.3}, metrics=lambda: ["mae"])
row("few rows", dense, fit={"batch_size": 2, "epochs": 1}, quick=True, metrics=lambda: ["mae"])
row("one row", dense, fit={"batch_size": 1, "epochs": 1}, metrics=lambda: ["mae"])
row(
    "few rows, mask",
    tokens,
    "sgd",
    lambda: crossentropy(True),
    (TOKENS, NEXT),
    {"batch_size": 2, "epochs": 1},
)
row(
    "few rows, sync norm",
    lambda: images(distributed.SyncBatchNormalization),
    data=(IMAGES, Y),
    fit={"batch_size": 2, "epochs": 1},
)
row("PyDataset", dense, data=Batches, looks=False, predicts=False, quick=True)
row("generator", dense, data=generated, looks=False, predicts=False, fit={"steps_per_epoch": 5})
row("DataLoader", dense, data=loader, looks=False, predicts=False)
row("tf.data", dense, data=tf_data, looks=False, predicts=False)
given = {"looks": False, "predicts": False}
rows = lambda *arrays: Dataset.from_arrays(arrays)  # noqa: E731
of_class = [np.choose(CLASS, [1, 3, 0.5]).astype("f")]
row(
    "Dataset",
    dense,
    data=read(lambda: rows(X, Y, WEIGHTS).shuffle(seed=5).batch(16)),
    fit={**once(5), "validation_data": lambda: rows(X, Y).batch(32) if mpistrat.has_strategy() else (X, Y)},
    metrics=lambda: ["mae"],
    quick=True,
    **given,
)
row(
    "Dataset of classes",
    classes,
    loss=lambda: crossentropy(True),
    data=read(
        lambda: rows(X, CLASS, *of_class[mpistrat.has_strategy() :]).shuffle(seed=5).repeat().batch(16)
    ),
    fit={"class_weight": lambda: {1: 3.0, 2: 0.5} if mpistrat.has_strategy() else None, "steps_per_epoch": 3},
    **given,
)
row(
    "Dataset of few rows",
    dense,
    data=read(lambda: rows(X, Y).batch(2)),
    fit={**once(39), "epochs": 1},
    **given,
)
distribute = strategy.experimental_distribute_dataset
row(
    "DistributedDataset",
    tokens,
    loss=lambda: crossentropy(True),
    data=read(lambda: (distribute if mpistrat.has_strategy() else list)(rows(TOKENS, NEXT).batch(16))),
    fit=once(5),
    **given,
)
row(
    "iterable",
    typed("mixed_float16"),
    scaled,
    data=read(lambda: Dataset.from_iterable(list(zip(X, Y, strict=True))).batch(16)),
    fit=once(5),
    tolerance=1e-3,
    **given,
)
row("by function", dense, data=read(by_function(True)), fit=once(49 // RANKS // (16 // RANKS) + 1), **given)
row(
    "by function, filtered",
    lambda: images(distributed.SyncBatchNormalization),
    data=read(by_function(False)),
    fit=once(49 // RANKS // (16 // RANKS) + 1),
    quick=True,
    **given,
)
stopping = keras.callbacks.EarlyStopping
row(
    "early stopping",
    dense,
    lambda: optimizers.SGD(0.3),
    fit={
        "epochs": 6,
        "validation_split": 0.3,
        "callbacks": lambda: [
            stopping(patience=1, restore_best_weights=True),
            keras.callbacks.ReduceLROnPlateau(patience=1),
        ],
    },
)

if __name__ == "__main__":
    asked = sys.argv[1:]
    for name, each in TABLE.items():
        if BACKEND not in each.backends or not (
            not asked or name in asked or (each.quick and "quick" in asked)
        ):
            continue
        start = time.monotonic()
        try:
            found, right = run(name)
        except BaseException:
            print(f"row {name}: raised", flush=True)
            raise
        if strategy.is_chief:
            figures = " ".join(f"{each:.1e}" for each in found)
            print(
                f"row {name}: {'ok' if right else 'OFF'} {figures} {time.monotonic() - start:.1f} s",
                flush=True,
            )
