"""Rows of models, optimizers, losses and data: the same training by plain Keras and by the ranks of a strategy.

    mpistrat run -n 2 tests/integrations/keras_training/parity.py [ROW ...]

``quick`` are the marked rows, which JAX and TensorFlow compile for fewer shapes.
Each row prints its name, the largest difference of a weight, of a log and of a prediction, and whether it is in bounds.
"""

import sys
import time

import keras
import numpy as np
from parity_models import (
    BACKEND,
    CLASS,
    IMAGES,
    NEXT,
    RANKS,
    ROWS,
    SIZES,
    TOKENS,
    WEIGHTS,
    Adversaries,
    Batches,
    Own,
    X,
    Y,
    by_function,
    classes,
    dense,
    embedded,
    frozen,
    generated,
    images,
    loaded,
    loader,
    mean_error,
    of_jax,
    once,
    outputs,
    own_step,
    read,
    strategy,
    tables,
    tensors,
    tf_data,
    tokens,
    trained,
    typed,
)

import mpistrat
import mpistrat.integrations.keras as distributed
from mpistrat.data import Dataset

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
            arguments = self.read_again()
            x = arguments.pop("x")
            found = model.evaluate(x, verbose=0, return_dict=True, **arguments)
            names = [name for name in sorted(found) if BACKEND != "tensorflow" or "_loss" not in name]
            logs.append(np.array([found[name] for name in names]))
        outputs = []
        if self.predicts:
            arguments = self.read_again()
            arguments.pop("y", None)
            outputs = model.predict(arguments.pop("x"), verbose=0, **arguments)
        return [np.asarray(each, "f8") for each in model.get_weights()], logs, keras.tree.flatten(outputs)

    def read_again(self):
        """The arguments of `evaluate`; without ``y``, those of `predict`."""
        data = self.data() if callable(self.data) else self.data
        if isinstance(data, tuple):
            return {"x": data[0], "y": data[1], "batch_size": 16}
        return {"x": data, "steps": self.fit.get("steps_per_epoch")}

    def shorten(self):
        """Train alone, with unequal parts on two ranks of one shape each: a compiled step instead of six."""
        self.looks = self.predicts = False
        if self.fit["batch_size"] == 16:
            self.fit["batch_size"] = 11


def difference(one, two):
    assert [np.shape(each) for each in one] == [np.shape(each) for each in two], (one, two)
    return max([float(np.max(np.abs(a - b), initial=0)) for a, b in zip(one, two, strict=True)], default=0.0)


def spread(row, plain):
    """How far plain Keras moves when the rows of each batch come in another order."""
    size = row.fit["batch_size"]
    order = np.concatenate([np.arange(i, min(i + size, ROWS))[::-1] for i in range(0, ROWS, size)])
    return difference(plain[0], row.train(order)[0])


def run(name, plain):
    """Train over ranks, and compare with what plain Keras has made."""
    row = TABLE[name]
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
row("weights and sum", dense, lambda: optimizers.SGD(0.001), lambda: losses.Huber(reduction="sum"), fit=weighted)
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
    "mask of a dense layer",
    lambda: tokens(recurrent=False),
    lambda: optimizers.Adam(0.01),
    lambda: crossentropy(from_logits=True),
    (TOKENS, NEXT),
    metrics=lambda: ["accuracy"],
    quick=True,
)
row("mask and sum", tokens, lambda: optimizers.SGD(0.001), lambda: crossentropy(True, reduction="sum"), (TOKENS, NEXT))
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
row("AUC", lambda: dense(), loss="mse", metrics=lambda: [metrics.AUC(from_logits=True)], data=(X, (Y > 0).astype("f")))
row("sync norm", lambda: images(distributed.SyncBatchNormalization), data=(IMAGES, Y), quick=True)
# A scale with which no sum of gradients overflows: a rank's part of it may fit where that of the batch does not.
scaled = lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.01), initial_scale=256.0)  # noqa: E731
row("float16", typed("mixed_float16"), scaled, tolerance=1e-3, quick=True)
row("bfloat16", typed("mixed_bfloat16"), lambda: optimizers.SGD(0.01), tolerance=1e-3)
row("own loss", Own, lambda: optimizers.Adam(0.01), None)
row("own step", own_step, lambda: optimizers.Adam(0.01), looks=False, quick=True)
row(
    "adversaries",
    Adversaries,
    lambda: optimizers.SGD(0.05),
    None,
    (X, IMAGES[:, 0].reshape(ROWS, -1)[:, :6].copy()),
    looks=False,
)
row("recompiled", trained, lambda: optimizers.Adam(0.01), metrics=lambda: ["mae"])
row("cloned", lambda: keras.models.clone_model(trained()), lambda: optimizers.Adam(0.01))
row("loaded", loaded, lambda: optimizers.Adam(0.01))
row("frozen", frozen, lambda: optimizers.Adam(0.01))
row("eager", dense, run_eagerly=True)
row("not compiled", dense, jit_compile=False, backends=("jax",))
row("several steps", dense, steps_per_execution=2, backends=("jax", "tensorflow"))
row("split", dense, fit={"validation_split": 0.3}, metrics=lambda: ["mae"])
row(
    "activity",
    lambda: dense(activity_regularizer=keras.regularizers.L1L2(0.02, 0.01)),
    lambda: optimizers.Adam(0.01),
    metrics=lambda: ["mae"],
)
row(
    "activity, few rows",
    lambda: dense(activity_regularizer="l1"),
    fit={"batch_size": 2, "epochs": 1, "validation_split": 0.3},
)
compiled = {"jit_compile": True, "backends": ("jax", "tensorflow")}
row("XLA", dense, lambda: optimizers.Adam(0.01, global_clipnorm=0.1), metrics=lambda: ["mae"], **compiled)
row("XLA, embedding", embedded, lambda: optimizers.Adam(0.01), data=(TOKENS, Y), steps_per_execution=2, **compiled)
row("XLA, few rows", dense, fit={"batch_size": 2, "epochs": 1, **weighted}, **compiled)
row("XLA, mask", tokens, loss=lambda: crossentropy(True), data=(TOKENS, NEXT), **compiled)
row(
    "XLA, sync norm",
    lambda: images(distributed.SyncBatchNormalization),
    data=(IMAGES, Y),
    fit={"epochs": 1},
    **compiled,
)
row("XLA, float16", typed("mixed_float16"), scaled, tolerance=1e-3, **compiled)
row("few rows", dense, fit={"batch_size": 2, "epochs": 1}, quick=True, metrics=lambda: ["mae"])
row("one row", dense, fit={"batch_size": 1, "epochs": 1}, metrics=lambda: ["mae"])
row("few rows, mask", tokens, "sgd", lambda: crossentropy(True), (TOKENS, NEXT), {"batch_size": 2, "epochs": 1})
row(
    "few rows, sync norm",
    lambda: images(distributed.SyncBatchNormalization),
    data=(IMAGES, Y),
    fit={"batch_size": 2, "epochs": 1},
)
row("PyDataset", dense, data=Batches, quick=True, metrics=lambda: ["mae", mean_error])
# With threads, plain Keras begins with batches that it has read for the construction of the model.
row("PyDataset, threads", dense, data=lambda: Batches(workers=2 if mpistrat.has_strategy() else 1))
row("generator", dense, data=generated, fit={"steps_per_epoch": len(SIZES)})
row("DataLoader", dense, data=loader)
row("tf.data", dense, data=tf_data, metrics=lambda: ["mae"])
row("torch tensors", dense, data=tensors)
row("JAX arrays", dense, data=of_jax)
row("tables", dense, data=tables)
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
    data=read(lambda: rows(X, CLASS, *of_class[mpistrat.has_strategy() :]).shuffle(seed=5).repeat().batch(16)),
    fit={"class_weight": lambda: {1: 3.0, 2: 0.5} if mpistrat.has_strategy() else None, "steps_per_epoch": 3},
    **given,
)
row("Dataset of few rows", dense, data=read(lambda: rows(X, Y).batch(2)), fit={**once(39), "epochs": 1}, **given)
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
    names = [
        name
        for name, each in TABLE.items()
        if BACKEND in each.backends and (not asked or name in asked or (each.quick and "quick" in asked))
    ]
    if "quick" in asked and BACKEND != "torch":
        names.remove("mask")  # its LSTM takes as long as four others
        for name in names:
            if name != "dense":
                TABLE[name].shorten()
    plain = {}  # each by one rank
    for name in names[strategy.comm.rank :: RANKS]:
        plain[name] = TABLE[name].train()
    for theirs in strategy.comm.allgather(plain):
        plain.update(theirs)
    for name in names:
        start = time.monotonic()
        try:
            found, right = run(name, plain[name])
        except BaseException:
            print(f"row {name}: raised", flush=True)
            raise
        if strategy.is_chief:
            figures = " ".join(f"{each:.1e}" for each in found)
            print(f"row {name}: {'ok' if right else 'OFF'} {figures} {time.monotonic() - start:.1f} s", flush=True)
