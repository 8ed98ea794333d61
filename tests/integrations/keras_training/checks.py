"""Callbacks, errors and files of Keras' training on several ranks. Prints the name of each check that has passed."""

import contextlib
import json
import sys
import zipfile
from functools import partial
from types import SimpleNamespace

import checking
import keras
import numpy as np
from checking import BACKEND, FIT, RANK, RANKS, STEPS, Chiefs, Counts, X, Y, alike, everywhere, folder, made, refused
from checks_of_files import FILES, backup, backup_that_ends_anywhere, preemption
from checks_of_input import INPUT
from keras import layers, ops

import mpistrat
import mpistrat.integrations.keras as distributed
from mpistrat.data import AutoShardPolicy, Dataset
from mpistrat.data.distribute.autoshard import divide
from mpistrat.replicas import ReplicaGroup


def callbacks_of_the_chief():
    model, chiefs, every = made(), Chiefs(), Counts()
    log, file = folder / "log.csv", folder / "model.keras"
    written = [keras.callbacks.CSVLogger(log), keras.callbacks.ModelCheckpoint(file)]
    model.fit(X, Y, epochs=3, callbacks=[chiefs, every, *written], **FIT)
    assert chiefs.batches == (3 * STEPS if RANK == 0 else 0)
    assert every.batches == 3 * STEPS
    assert len(log.read_text().splitlines()) == 4
    checking.strategy.barrier()
    for mine, kept in zip(model.get_weights(), keras.saving.load_model(file).get_weights(), strict=True):
        assert np.array_equal(mine, kept)
    assert alike(model)
    model.fit(X, Y, epochs=1, callbacks=[chiefs, chiefs] if RANK == 0 else [], **FIT)
    assert chiefs.batches == (5 * STEPS if RANK == 0 else 0)


def stop_by_one_rank():
    # In an epoch, with its last batch, and in the next one.
    for at, by in ((2, 0), (STEPS, 0), (STEPS, RANKS - 1), (STEPS + 1, RANKS - 1)):

        def stop(counts, at=at, by=by):
            if by == RANK and counts.batches == at:
                counts.model.stop_training = True

        model, counts = made(), Counts(stop)
        model.fit(X, Y, epochs=4, callbacks=[counts], **FIT)
        assert counts.batches == (at if at == STEPS else at + 1), counts.batches
        assert alike(model)


def stop_after_an_epoch():
    def stop(counts):
        counts.model.stop_training = RANK == 0

    model, counts = made(), Counts(after_epoch=stop)
    model.fit(X, Y, epochs=4, callbacks=[counts], **FIT)
    assert counts.batches == STEPS


def nan_on_one_rank():
    for row in (8, 15):  # of the first rank and of the last, in the second batch
        x = X.copy()
        x[row] = np.nan
        model, counts = made(), Counts()
        model.fit(x, Y, epochs=2, callbacks=[counts, keras.callbacks.TerminateOnNaN()], **FIT)
        assert everywhere(counts.batches) == [3] * RANKS, everywhere(counts.batches)


def weights_of_one_rank():
    for before_fit in (True, False):
        model = made()
        if not before_fit:
            model.fit(X, Y, epochs=1, **FIT)
        before = model.layers[0].get_weights()
        if RANK == RANKS - 1:
            model.layers[0].set_weights([each + 1 for each in before])
        for method in (partial(model.predict, X, verbose=0), partial(model.fit, X, Y, **FIT)):
            refused(ValueError, f"first/kernel of rank {RANKS - 1} is not", method)
    model.layers[0].set_weights(before)
    model.fit(X, Y, epochs=1, **FIT)
    assert alike(model)
    for _ in range(5):
        model.train_on_batch(X, Y)
    if RANK == RANKS - 1:
        model.layers[0].set_weights(before)
    # Not each batch is preceded by a comparison.
    several = partial(list, map(partial(model.train_on_batch, X), [Y] * 3))
    refused(ValueError, f"first/kernel of rank {RANKS - 1} is not", several)


def first_weights():
    """Drawn by each rank from its own seed: the chief's are those of all."""
    for inputs in ([keras.Input((4,))], []):  # built, or by its first batch
        keras.utils.set_random_seed(RANK)
        model = keras.Sequential([*inputs, layers.Dense(1)])
        whole = everywhere(model.predict(X, verbose=0))
        assert all(np.array_equal(whole[0], each) for each in whole)
        np.testing.assert_allclose(whole[0], X @ model.get_weights()[0], rtol=1e-4, atol=1e-5)
    model = made(seed=RANK)
    model.layers[1].set_weights([np.ones((6, 1)), np.zeros(1)])
    firsts = checking.strategy.comm.bcast(model.get_weights())
    model.evaluate(X, Y, verbose=0)
    assert all(np.array_equal(*pair) for pair in zip(firsts, model.get_weights(), strict=True))
    assert RANK == 0 or not np.array_equal(firsts[0], made(seed=RANK).get_weights()[0])
    model.fit(X, Y, epochs=1, **FIT)
    assert alike(model)


def weights_that_ranks_have_trained():
    with mpistrat.OneDeviceStrategy("cpu").scope():
        model = made()
        model.fit(X + RANK, Y, epochs=1, **FIT)
    with checking.strategy.scope():
        refused(ValueError, "first/kernel", lambda: model.fit(X, Y, **FIT))


def other_models():
    size = 2 + RANK
    model = keras.Sequential([keras.Input((4,)), layers.Dense(size, name="wide"), layers.Dense(1)])
    model.compile("sgd", "mse")
    refused(ValueError, "wide/kernel of shape (4, 3), float32 where rank 0 has", lambda: model.fit(X, Y, **FIT))


def order_of_rows():
    """Of a seed, whatever the number of ranks."""
    for x, shuffle in ((X, True), (X, "batch"), (ops.convert_to_tensor(X), True)):
        fit = {**FIT, "shuffle": shuffle, "epochs": 2}
        with checking.strategy.scope():
            model = made()
        model.fit(x, Y, **fit)
        with mpistrat.OneDeviceStrategy("cpu").scope():
            alone = made()
            alone.fit(x, Y, **fit)
        for mine, other in zip(model.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_allclose(mine, other, atol=1e-6)
    for workers in (1, 2):
        found = []
        for scope in (checking.strategy.scope(), mpistrat.OneDeviceStrategy("cpu").scope()):
            with scope:
                model = made()
                for _ in range(2):
                    model.fit(Batches(workers=workers), epochs=2, verbose=0)
            found.append(model.get_weights())
        for mine, other in zip(*found, strict=True):
            np.testing.assert_allclose(mine, other, atol=1e-6)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return STEPS

    def __getitem__(self, i):
        return X[i * 8 : i * 8 + 8], Y[i * 8 : i * 8 + 8]


def predictions_for_the_chief():
    model = made()
    whole = model.predict(X[:9], batch_size=4, verbose=0)
    mine = model.predict(X[:9], batch_size=4, verbose=0, gather="chief")
    assert whole.shape == (9, 1)
    assert np.array_equal(mine, whole) if RANK == 0 else mine is None
    refused(ValueError, "gather must be 'all' or 'chief'", lambda: model.predict(X, gather="some"))


def files_of_each_rank():
    """Training on shuffled files is that of one rank on the same batches: as many steps, losses and weights."""
    if RANK == 0:
        for number, rows in enumerate(np.array_split(np.concatenate([X, Y], 1), [3, 9, 10, 16, 21, 29])):
            np.save(folder / f"xy-{number}.npy", rows)
    checking.strategy.barrier()
    files = Dataset.from_npy(folder / "xy-*.npy").shuffle(seed=3).batch(8)
    ready = files.definition.ready()
    alone = ReplicaGroup(SimpleNamespace(size=1, rank=0))
    one = divide(AutoShardPolicy.AUTO, ready.source, ready.transforms, alone, False)
    in_order = np.concatenate([one.batch(step, 0) for step in range(one.steps)])
    model, other = made(), made()
    other.set_weights(model.get_weights())
    logs = model.fit(files.map(lambda rows: (rows[:, :4], rows[:, 4:])), verbose=0)
    expected = other.fit(Dataset.from_arrays((in_order[:, :4], in_order[:, 4:])).batch(8), verbose=0)
    assert one.lanes is not None
    assert int(model.optimizer.iterations) == int(other.optimizer.iterations) == 5
    np.testing.assert_allclose(logs.history["loss"], expected.history["loss"], rtol=1e-5)
    for mine, theirs in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def datasets():
    rows = Dataset.from_arrays((X[:33], Y[:33], np.arange(33, dtype="f")))
    model, batches = made(metrics=["mae"]), rows.batch(8)
    arrays = model.evaluate(X[:33], Y[:33], sample_weight=np.arange(33, dtype="f"), batch_size=8, verbose=0)
    outputs = model.predict(X[:33], batch_size=8, verbose=0)
    for data in (
        batches,
        checking.strategy.experimental_distribute_dataset(batches),
        rows.filter(lambda *row: True).batch(8),
    ):
        np.testing.assert_allclose(model.evaluate(data, verbose=0), arrays, rtol=1e-5)
        np.testing.assert_allclose(model.predict(data, verbose=0), outputs, rtol=1e-5, atol=1e-6)
    # Files of its own for each rank would give the rows in another order.
    if RANK == 0:
        for number in range(33):
            np.save(folder / f"rows-{number:02}.npy", X[number : number + 1])
    checking.strategy.barrier()
    files = Dataset.from_npy(folder / "rows-*.npy").batch(8)
    np.testing.assert_allclose(model.predict(files, verbose=0), outputs, rtol=1e-5, atol=1e-6)
    few = model.predict(data, steps=2, verbose=0, gather="chief")
    assert np.allclose(few, outputs[:16], atol=1e-6) if RANK == 0 else few is None
    refused(ValueError, "y was given beside a dataset", lambda: model.fit(batches, Y))
    refused(ValueError, "give the number of steps", lambda: model.fit(rows.repeat().batch(8), verbose=0))
    refused(ValueError, "not both", lambda: model.fit(batches, class_weight={0: 1.0}, verbose=0))
    refused(ValueError, "call .batch(global_batch_size) first", lambda: model.fit(rows, verbose=0))


def epochs_of_a_dataset():
    """Each has its own order, which goes on in the next call, and depends on no number of ranks."""
    rows = Dataset.from_arrays((X, Y)).shuffle(seed=1).batch(8)

    def trained():
        model = made()
        model.fit(rows, epochs=2, verbose=0)
        model.fit(rows, epochs=3, initial_epoch=2, verbose=0)
        model.fit(rows, epochs=2, initial_epoch=1, verbose=0)
        return model.get_weights()

    with checking.strategy.scope():
        mine = trained()
    with mpistrat.OneDeviceStrategy("cpu").scope():
        alone = trained()
    by_hand = made()
    epochs = [list(rows) for _ in range(3)]
    for epoch in (0, 1, 2, 1):
        for x, y in epochs[epoch]:
            by_hand.train_on_batch(x, y)
    for one, other, plain in zip(mine, alone, by_hand.get_weights(), strict=True):
        np.testing.assert_allclose(one, plain, atol=1e-6)
        np.testing.assert_allclose(other, plain, atol=1e-6)


def virtual_replicas():
    for count in (RANKS, 2 * RANKS):
        with mpistrat.MultiWorkerMirroredStrategy(virtual_replicas=count).scope():
            model = made()
        refused(ValueError, "make the strategy without virtual_replicas", partial(model.fit, X, Y, **FIT))


def what_cannot_be_trained():
    model = made(layers.Dense(3, activity_regularizer=keras.regularizers.OrthogonalRegularizer(), name="active"))
    refused(ValueError, "active has the activity regularizer Orthogonal", lambda: model.fit(X, Y, **FIT))
    if BACKEND == "tensorflow":  # elsewhere Keras raises
        model = made()
        model.compile("sgd", keras.losses.MeanSquaredError(reduction=None))
        refused(ValueError, "a loss of reduction=None", lambda: model.fit(X, Y, **FIT))
        model = made(layers.BatchNormalization(synchronized=True))
        refused(ValueError, "has synchronized=True", lambda: model.fit(X, Y, **FIT))
    if BACKEND == "torch":
        model = made(jit_compile=True)
        refused(ValueError, "was compiled with jit_compile=True", lambda: model.fit(X, Y, **FIT))
    several = keras.callbacks.CallbackList()
    refused(TypeError, "give the callbacks as a list", lambda: made().fit(X, Y, callbacks=several, **FIT))


class Largest(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros", aggregation="mean", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(ops.maximum(self.value, ops.max(y_pred)))

    def result(self):
        return self.value * 1


def metric_without_sums():
    refused(ValueError, "has aggregation='mean'", lambda: made(metrics=[Largest()]).fit(X, Y, **FIT))


def files_of_batch_norm():
    model = made(distributed.SyncBatchNormalization(name="norm"))
    model.fit(X, Y, epochs=1, **FIT)
    model.save(folder / "norm.keras")
    loaded = keras.saving.load_model(folder / "norm.keras")
    assert type(loaded.get_layer("norm")) is distributed.SyncBatchNormalization
    with zipfile.ZipFile(folder / "norm.keras") as file:  # for Keras alone
        kept = {each["config"]["name"]: each for each in json.loads(file.read("config.json"))["config"]["layers"]}
    assert (kept["norm"]["module"], kept["norm"]["class_name"]) == ("keras.layers", "BatchNormalization")
    assert kept["norm"]["config"].keys() == layers.BatchNormalization().get_config().keys()
    for mine, kept in zip(model.get_weights(), loaded.get_weights(), strict=True):
        assert np.array_equal(mine, kept)
    assert alike(model)


def batch_norm_far_from_zero():
    """In float32 the mean of squares less the square of the mean has no digit of this variance."""
    norm = distributed.SyncBatchNormalization(momentum=0.0)
    model = keras.Sequential([keras.Input((4,)), norm, layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(X + 1e4, Y, epochs=1, batch_size=len(X), verbose=0)
    found = keras.ops.convert_to_numpy(norm.moving_variance)
    assert np.allclose(found, X.var(axis=0), rtol=0.01), (found, X.var(axis=0))


def plain_batch_norm():
    """Its moving statistics are averaged at the end of an epoch."""
    model = made(layers.BatchNormalization())
    model.fit(X, Y, epochs=2, validation_data=(X, Y), **FIT)
    assert alike(model)


def no_tracing_after_an_epoch(jit_compile="auto"):
    traced = []

    class Traced(keras.Sequential):
        def compute_loss(self, *args, **kwargs):
            traced.append(1)
            return super().compute_loss(*args, **kwargs)

    model = Traced([keras.Input((4,)), layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=jit_compile)
    rows = slice(0, 37)
    counts = Counts(after_epoch=lambda counts: seen.append(len(traced)))
    seen = []
    model.fit(X[rows], Y[rows], epochs=3, callbacks=[counts], **FIT)
    model.fit(X[rows], Y[rows], epochs=1, callbacks=[counts], **FIT)
    assert BACKEND == "torch" or len(set(seen)) == 1, seen


def compiled_by_xla():
    """The gradients, and what the optimizer does with their sums."""
    if BACKEND != "tensorflow":
        return
    import tensorflow as tf

    no_tracing_after_an_epoch(jit_compile=True)

    def called(value):  # which XLA cannot compile
        return tf.ensure_shape(tf.numpy_function(lambda each: each, [value], value.dtype), value.shape)

    class Calls(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(called(gradient), variable, learning_rate)

    def in_layer(inputs):
        return called(inputs)

    for more, optimizer in (([layers.Lambda(in_layer)], None), ([], Calls(0.05))):
        made(*more, optimizer=optimizer).fit(X, Y, **FIT)
        model = made(*more, optimizer=optimizer and Calls(0.05), jit_compile=True)
        refused(tf.errors.InvalidArgumentError, "PyFunc", lambda model=model: model.fit(X, Y, **FIT))


def random_numbers():
    """Of each rank its own, and as before after `fit`."""
    model = made(layers.Dropout(0.5))
    states = []
    drawn = Counts(lambda counts: states.append(int(ops.convert_to_numpy(generator.state.value)[0])))
    (generator,) = [each.seed_generator for each in model.layers if hasattr(each, "seed_generator")]
    before = checking.strategy.comm.bcast(int(ops.convert_to_numpy(generator.state.value)[0]))
    model.fit(X, Y, epochs=1, callbacks=[] if BACKEND == "jax" else [drawn], **FIT)
    assert int(ops.convert_to_numpy(generator.state.value)[0]) == before
    if BACKEND != "jax":  # whose variables hold nothing while it trains
        assert len(set(everywhere(states[0]))) == RANKS
    assert alike(model)


def evaluation_in_a_callback():
    found = []
    look = Counts(after_epoch=lambda counts: found.append(counts.model.evaluate(X, Y, verbose=0)))
    model = made()
    logs = model.fit(X, Y, epochs=2, validation_data=(X, Y), callbacks=[look], **FIT).history
    np.testing.assert_allclose(found, logs["val_loss"], rtol=1e-5)


def overflow_on_one_rank():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=1024.0)
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = made(optimizer=optimizer)
    finally:
        keras.config.set_dtype_policy("float32")
    y = Y.copy()
    y[7] = 1e38  # of the last rank
    before = model.get_weights()
    model.train_on_batch(X[:8], y[:8])
    assert all(np.array_equal(*pair) for pair in zip(before, model.get_weights(), strict=True))
    assert everywhere(float(ops.convert_to_numpy(optimizer.dynamic_scale.value))) == [512.0] * RANKS
    model.train_on_batch(X[:8], Y[:8])
    assert not np.array_equal(before[0], model.get_weights()[0])


class Branch(keras.Model):
    """A layer that only batches with a large row use: on PyTorch the other ranks have no gradient of it."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.never = layers.Dense(1), layers.Dense(1), layers.Dense(1)

    def build(self, shape):
        for each in (self.always, self.sometimes, self.never):
            each.build(shape)

    def call(self, x):
        out = self.always(x)
        if not isinstance(x, keras.KerasTensor) and float(ops.max(x)) > 50:
            out = out + self.sometimes(x)
        return out


def metrics_of_masked_weights():
    """A mask and a weight for each time step; the oracle of the metrics is NumPy."""
    rng = np.random.default_rng(0)
    tokens, target = rng.integers(1, 6, (12, 5)), rng.normal(size=(12, 5, 2)).astype("f4")
    tokens[:6, 2:] = 0
    weights = rng.random((12, 5)).astype("f4")
    given = keras.Input((5,), dtype="int32")
    model = keras.Model(given, layers.Dense(2)(layers.Embedding(6, 3, mask_zero=True)(given)))
    model.compile("sgd", "mse", weighted_metrics=["mae", "mse"])
    error, used = model.predict(tokens, batch_size=12, verbose=0) - target, weights * (tokens > 0)
    for size in (6, 12):
        logs = model.evaluate(tokens, target, size, sample_weight=weights, verbose=0, return_dict=True)
        for name, each in (("mae", abs(error)), ("mse", error**2)):
            np.testing.assert_allclose(logs[name], (each.mean(2) * used).sum() / used.sum(), rtol=1e-5)
    if BACKEND == "torch":  # whose batches may be views of a tensor
        import torch

        given = torch.tensor(weights)
        model.compile("sgd", keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
        for _ in range(2):
            model.evaluate(tokens, target, 6, sample_weight=given, verbose=0)
            np.testing.assert_array_equal(given, weights)


def no_gradient_on_one_rank():
    if BACKEND != "torch":
        return
    x = X[:8].copy()
    x[7] = 100
    keras.utils.set_random_seed(1)
    model = Branch()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.build((None, 4))
    before = [each.numpy() for each in (model.sometimes.kernel, model.never.kernel)]
    model.train_on_batch(x, Y[:8])
    assert not np.array_equal(model.sometimes.kernel.numpy(), before[0])
    assert np.array_equal(model.never.kernel.numpy(), before[1])
    assert alike(model)


CHECKS = [
    callbacks_of_the_chief,
    stop_by_one_rank,
    stop_after_an_epoch,
    nan_on_one_rank,
    weights_of_one_rank,
    first_weights,
    weights_that_ranks_have_trained,
    other_models,
    order_of_rows,
    datasets,
    files_of_each_rank,
    epochs_of_a_dataset,
    predictions_for_the_chief,
    virtual_replicas,
    what_cannot_be_trained,
    metric_without_sums,
    files_of_batch_norm,
    batch_norm_far_from_zero,
    plain_batch_norm,
    no_tracing_after_an_epoch,
    compiled_by_xla,
    random_numbers,
    evaluation_in_a_callback,
    overflow_on_one_rank,
    metrics_of_masked_weights,
    no_gradient_on_one_rank,
    *FILES,
    *INPUT,
]
# These enter scopes of their own.
ALONE = (
    order_of_rows,
    virtual_replicas,
    epochs_of_a_dataset,
    backup,
    backup_that_ends_anywhere,
    preemption,
    weights_that_ranks_have_trained,
)
if __name__ == "__main__":
    for check in CHECKS:
        if len(sys.argv) > 2 and check.__name__ not in sys.argv[2:]:
            continue
        # A strategy of its own: an error leaves the collectives of another out of step.
        checking.strategy = mpistrat.MultiWorkerMirroredStrategy()
        with contextlib.nullcontext() if check in ALONE else checking.strategy.scope():
            check()
        checking.strategy.barrier()
        if RANK == 0:
            print(f"passed {check.__name__}", flush=True)
    print("all checks passed")
