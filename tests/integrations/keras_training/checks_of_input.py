"""Losses, weights and batches that differ between ranks, or depend on all rows of a batch."""

import gc
import weakref

import checking
import keras
import numpy as np
from checking import BACKEND, FIT, RANK, RANKS, Chiefs, X, Y, alike, everywhere, folder, made, refused
from keras import layers, ops

from mpistrat.data import Dataset

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


INPUT = [losses_of_whole_batches, other_input]
