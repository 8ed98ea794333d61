"""Losses, weights and batches that differ between ranks, or depend on all rows of a batch."""

import gc
import pickle
import re
import warnings
import weakref
from functools import partial

import keras
import numpy as np
from checking import BACKEND, FIT, RANK, RANKS, STEPS, Counts, X, Y, alike, everywhere, made, refused
from keras import layers, ops

from mpistrat.data import Dataset

FIRST = -(-8 // RANKS)  # rows of the chief in a batch of 8
OTHER = "the ranks have read other batches"


def losses_of_whole_batches():
    """Their mean over ranks is another loss; with the axes of a row they are means over rows."""
    losses = keras.losses
    for loss, name in (
        (losses.Dice(), "Dice"),
        (losses.Dice(axis=(0, 1)), "Dice"),
        (losses.Tversky, "Tversky"),
        ("dice", "dice"),
        (losses.circle, "circle"),
        ([losses.Circle()], "Circle"),
    ):
        model = made()
        model.compile("sgd", loss)
        for method in (model.fit, model.evaluate):
            refused(ValueError, f"with the loss {name}, which combines", lambda method=method: method(X, Y, verbose=0))
        assert model.predict(X, verbose=0).shape == (40, 1)
    model.compile("sgd", losses.Dice(axis=1))
    model.fit(X, Y, **FIT)


def losses_of_the_program():
    """A loss that is not a mean over rows is told once, by the chief; others never."""

    def total(y, outputs):
        return ops.sum(ops.square(y - outputs))

    def correlation(y, outputs):
        y, outputs = y - ops.mean(y), outputs - ops.mean(outputs)
        return -ops.sum(y * outputs) / ops.sqrt(ops.sum(y * y) * ops.sum(outputs * outputs))

    def mean(y, outputs):
        return ops.mean(ops.square(y - outputs))

    def of_rows(y, outputs):
        return ops.square(y - outputs)[:, 0]

    def noisy(y, outputs):
        return total(y, outputs) * random.uniform()

    def undefined(y, outputs):
        return total(y, outputs) * float("nan")

    def fails_on_parts(y, outputs):
        if outputs.shape[0] is not None and outputs.shape[0] < 6:
            raise RuntimeError("not a batch")
        return total(y, outputs)

    class Own(keras.Loss):
        """Its result is a sum in any way."""

        def __call__(self, y_true, y_pred, sample_weight=None):
            return total(y_true, y_pred)

    class Summed(keras.Loss):
        def __init__(self, of):
            super().__init__(reduction="sum")
            self.call = of

    random = np.random.default_rng(0)
    weights = np.arange(40, dtype="f")
    right = (mean, of_rows, noisy, undefined, Summed(of_rows), Summed(total), keras.losses.MeanSquaredError("sum"))
    cases = [(loss, True) for loss in (total, correlation, Own(), Summed(mean))]
    cases += [(loss, False) for loss in (*right, fails_on_parts, [keras.losses.mean_squared_error])]
    for loss, told in cases:
        model = made()
        model.compile(keras.optimizers.SGD(1e-4), loss)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model.train_on_batch(X[:1], Y[:1]) if loss is mean else None
            for _ in range(2):
                model.fit(X, Y, sample_weight=None if isinstance(loss, Own) else weights, **{**FIT, "batch_size": 20})
        found = [str(each.message) for each in found if "is not a mean over rows" in str(each.message)]
        assert len(found) == (told and RANK == 0), (loss, found)
    # The numbers are those of the rows of the chief in the first batch.
    model = made()
    outputs = model.predict(X[:8], verbose=0)[:FIRST]
    model.compile(keras.optimizers.SGD(0.0), total)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.fit(Dataset.from_arrays((X, Y)).batch(8), verbose=0)
    message = " ".join(str(each.message) for each in found)
    if RANK == 0:
        whole, halves = (float(each) for each in re.search(r"it is (\S+), but .* is (\S+)\.", message).groups())
        squares, half = np.square(Y[:FIRST] - outputs), FIRST // 2
        of_halves = half * squares[:half].sum() + (FIRST - half) * squares[half:].sum()
        np.testing.assert_allclose([whole, halves], [squares.sum(), of_halves / FIRST], rtol=1e-4)


def losses_of_one_rank():
    """The last rank fails in the check of one batch, or has a loss of another name: no rank waits for another."""
    last = RANK == RANKS - 1

    def mean(y, outputs):
        return ops.mean(ops.square(y - outputs))

    def fails_in_the_check(y, outputs):
        if last and isinstance(outputs, np.ndarray):
            raise RuntimeError("not a tensor")
        return mean(y, outputs)

    def total(y, outputs):
        return ops.sum(ops.square(y - outputs))

    whole = made()
    whole.fit(X, Y, **FIT)
    model = made()
    model.compile(keras.optimizers.SGD(0.05), fails_in_the_check)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.fit(X, Y, **FIT)
    assert not [each for each in found if "is not a mean over rows" in str(each.message)]
    assert alike(model)
    np.testing.assert_allclose(model.get_weights()[0], whole.get_weights()[0], rtol=1e-4)
    for mine, others in ((total, mean), ("mae", "mse"), (mean, keras.losses.MeanSquaredError())):
        model = made()
        model.compile("sgd", mine if last else others)
        if RANKS > 1:
            refused(ValueError, "was given loss=", lambda model=model: model.fit(X, Y, **FIT))
            assert alike(model)


def other_input():
    x = X + RANK
    refused(ValueError, "array 0 differs", lambda: made().fit(x, Y, **FIT))
    refused(ValueError, OTHER, lambda: made().train_on_batch(x, Y))
    refused(ValueError, OTHER, lambda: made().test_on_batch(x, Y))

    def batches(x, end=40):
        for start in range(0, end, 8):
            yield x[start : start + 8], Y[start : start + 8]

    refused(ValueError, OTHER, lambda: made().fit(batches(x), verbose=0))
    refused(ValueError, OTHER, lambda: made().fit(X, Y, validation_data=batches(x), **FIT))
    refused(ValueError, OTHER, lambda: made().evaluate(batches(x), verbose=0))
    refused(ValueError, OTHER, lambda: made().evaluate(batches(X, 40 - 8 * RANK), verbose=0))
    model = made()
    np.testing.assert_allclose(
        model.evaluate(batches(X), verbose=0), model.evaluate(X, Y, batch_size=8, verbose=0), rtol=1e-5
    )


class OwnTest(keras.Sequential):
    def test_step(self, *args):
        x, y = args[-1][:2]
        if BACKEND == "jax":
            outputs, _ = self.stateless_call(args[0][0], args[0][1], x)
            return {"own": ops.mean(outputs - y)}, args[0]
        return {"own": ops.mean(self(x) - y)}


def own_test_step():
    """Its logs are means over the rows of the last batch, which are not as many as those of a batch of `fit`."""
    keras.utils.set_random_seed(1)
    model = OwnTest([keras.Input((4,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    evaluate = partial(model.evaluate, X[:35], Y[:35], batch_size=8, verbose=0, return_dict=True)
    look = Counts(after_batch=lambda counts: counts.model.evaluate(X[:1], Y[:1], verbose=0))
    for _ in range(2):
        mine = evaluate()["own"]
        np.testing.assert_allclose(mine, np.mean(model.predict(X[:35], verbose=0)[32:] - Y[32:35]), rtol=1e-4)
        held = model.fit(X, Y, validation_data=(X[:35], Y[:35]), callbacks=[look] * (BACKEND != "jax"), **FIT)
        np.testing.assert_allclose(held.history["val_own"], evaluate()["own"], rtol=1e-4)


def errors_of_the_program():
    """On JAX, variables have no value then; the error is still the program's."""

    class Fails(keras.Sequential):
        def train_step(self, *args):
            raise RuntimeError("of the program")

        test_step = train_step

    for name in ("fit", "evaluate", "train_on_batch"):
        keras.utils.set_random_seed(1)
        model = Fails([keras.Input((4,)), layers.Dropout(0.5), layers.Dense(1)])
        model.compile("sgd", "mse")
        refused(RuntimeError, "of the program", partial(getattr(model, name), X, Y))


def other_arguments():
    model = made()
    refused(ValueError, "fit was given batch_size=", lambda: model.fit(X, Y, **{**FIT, "batch_size": 8 + RANK}))
    refused(ValueError, "evaluate was given steps=", lambda: model.evaluate(X, Y, steps=1 + RANK, verbose=0))
    refused(ValueError, "compile", lambda: keras.Sequential([layers.Dense(1)]).fit(X, Y, **FIT))


def evaluation_after_a_batch():
    """Keras adds the rest of the epoch, here its last batch, to what the evaluation leaves."""
    if BACKEND == "jax":  # its evaluation takes the state that `fit` goes on with
        return
    found = []

    def look(counts):
        if counts.batches == STEPS - 1:
            found.extend(counts.model.evaluate(*rows, verbose=0) for rows in ((X[32:], Y[32:]), (X, Y)))

    (loss,) = made().fit(X, Y, callbacks=[Counts(after_batch=look)], **FIT).history["loss"]
    np.testing.assert_allclose(loss, (8 * found[0] + 40 * found[1]) / 48, rtol=1e-5)


def sums_of_numbers():
    """A number that a step gives to a metric weighs as its part of the batch."""

    class Adds(keras.Sequential):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            self.added.update_state(loss)
            return loss

    model = Adds([keras.Input((4,)), layers.Dense(1)])
    model.added = keras.metrics.Sum(name="added")
    model.compile("sgd", "mse")
    found = model.evaluate(X, Y, batch_size=8, verbose=0, return_dict=True)
    np.testing.assert_allclose(found["added"], STEPS * found["loss"], rtol=1e-5)


def own_optimizer():
    """What it does with gradients before Keras takes them is done with those of the whole batch."""

    class Halves(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            return super().apply([each / ops.norm(each) for each in grads], trainable_variables)

    model = made(optimizer=Halves(0.5))
    before = model.get_weights()[0]
    model.train_on_batch(X[:9], Y[:9])
    moved = model.get_weights()[0] - before
    np.testing.assert_allclose(np.linalg.norm(moved), 0.5, rtol=1e-5)
    assert "apply" not in vars(model.optimizer)


def drift_of_rounding():
    """Processors of several kinds round differently: the chief's weights are those of all. More is an error."""
    ends = []
    for by in (1e-6, 1e-2):

        def drifts(counts, by=by):
            for each in (counts.model.layers[0].kernel, counts.model.optimizer.variables[-1]):
                each.assign(each * (1 + by * RANK))

        model = made(optimizer=keras.optimizers.Adam(0.01))
        fit = partial(model.fit, X, Y, callbacks=[Counts(after_epoch=drifts)], **{**FIT, "epochs": 3})
        if by < 1e-4:
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                fit()
                fit()  # begins with equal weights
            ends.append(["last digits" in str(each.message) for each in found].count(True))
        else:
            refused(ValueError, "after epoch 1, ", fit)
    assert RANK > 0 or ends[0] >= 4, ends


def parts_of_a_model_in_fit():
    """A callback predicts with layers of the model: random numbers and moving statistics stay a rank's own."""
    keras.utils.set_random_seed(1)
    x, dropout = keras.Input((4,)), layers.Dropout(0.5)
    y = layers.BatchNormalization()(dropout(layers.Dense(3)(x)))
    model, part = keras.Model(x, layers.Dense(1)(y)), keras.Model(x, y)
    model.compile("sgd", "mse")
    seeds = []

    def look(counts):
        part.predict(X[:4], verbose=0)
        seeds.append(np.array(ops.convert_to_numpy(dropout.seed_generator.state.value)).tolist())

    if BACKEND != "jax":
        model.fit(X, Y, callbacks=[Counts(after_batch=look)], **FIT)
        for of_ranks in zip(*everywhere(seeds), strict=True):
            assert len({*map(tuple, of_ranks)}) == len(of_ranks), seeds


def own_updates():
    """Of weights, which no optimizer of Keras has made: no rank knows of those of others."""

    class Moves(keras.Sequential):
        def train_step(self, *args):
            mean = ops.mean(args[-1][0])
            if BACKEND == "jax":
                weights, *rest = args[0]
                return {"own": mean}, ([weights[0] + mean, *weights[1:]], *rest)
            kernel = self.layers[0].kernel
            kernel.assign(kernel + mean)
            return {"own": mean}

    model = Moves([keras.Input((4,)), layers.Dense(1, name="moved")])
    model.compile("sgd", "mse")
    refused(
        ValueError, "moved/kernel of rank 1 is not that of rank 0: only optimizers", partial(model.fit, X, Y, **FIT)
    )


def strings():
    if BACKEND != "tensorflow":  # whose tensors alone hold strings
        return
    import tensorflow as tf

    lookup = layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")
    model = keras.Sequential([keras.Input((1,), dtype="string"), lookup, layers.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", "mse")

    def evaluate(words):
        rows = tf.data.Dataset.from_tensor_slices(([[each] for each in words], Y[:9]))
        return model.evaluate(rows.batch(4), verbose=0)

    np.testing.assert_allclose(evaluate("ab?abbbaa"), np.mean(np.square(1 - Y[:9])), rtol=1e-5)
    refused(ValueError, OTHER, lambda: evaluate("ab?abbbaa" if RANK else "aa?abbbaa"))


def datasets_end():
    """A dataset that is no longer used is not kept, nor are its arrays; and it can be copied to another process."""
    model, rows = made(), Dataset.from_arrays((X, Y)).batch(8)
    model.evaluate(rows, verbose=0)
    assert len(list(pickle.loads(pickle.dumps(rows)))) == STEPS
    gone = weakref.ref(rows)
    del rows
    gc.collect()
    assert gone() is None


def tensors():
    """That NumPy refuses to read: they record gradients, or have bfloat16."""
    if BACKEND != "torch":
        return
    import torch

    model = made()
    whole = model.evaluate(X, Y, batch_size=8, verbose=0)
    recorded, halves = torch.from_numpy(X).requires_grad_(), torch.from_numpy(X).bfloat16()
    for x, rtol in ((recorded, 1e-6), (halves, 0.01)):  # bfloat16 has 8 bits
        np.testing.assert_allclose(model.evaluate(x, Y, batch_size=8, verbose=0), whole, rtol=rtol)
        model.train_on_batch(x, Y)
        whole = model.evaluate(X, Y, batch_size=8, verbose=0)


INPUT = [
    losses_of_whole_batches,
    losses_of_the_program,
    losses_of_one_rank,
    other_input,
    own_test_step,
    other_arguments,
    evaluation_after_a_batch,
    sums_of_numbers,
    own_optimizer,
    drift_of_rounding,
    parts_of_a_model_in_fit,
    errors_of_the_program,
    own_updates,
    strings,
    datasets_end,
    tensors,
]
