"""What the checks of Keras' training on several ranks share."""

import pathlib
import sys

import keras
import numpy as np
from keras import layers

import mpistrat
import mpistrat.integrations.keras  # trains over ranks

BACKEND = keras.backend.backend()
strategy = mpistrat.MultiWorkerMirroredStrategy()
RANKS, RANK = strategy.num_replicas_in_sync, strategy.comm.rank
folder = pathlib.Path(strategy.comm.bcast(sys.argv[1]))
random = np.random.default_rng(0)
X = random.normal(size=(40, 4)).astype("f")
Y = X.sum(1, keepdims=True)
STEPS = 5
FIT = {"batch_size": 8, "shuffle": False, "verbose": 0}


def made(*more, seed=1, optimizer=None, metrics=None, **compiled):
    """A compiled model, of equal weights on all ranks."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(6, activation="tanh", name="first"), *more, layers.Dense(1)]
    )
    model.compile(optimizer or keras.optimizers.SGD(0.05), "mse", metrics=metrics, **compiled)
    return model


def everywhere(value):
    return strategy.comm.allgather(value)


def alike(model):
    """Whether all ranks have the same weights."""
    mine = model.get_weights()
    theirs = strategy.comm.bcast(mine)
    return all(everywhere(all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))))


def refused(kind, text, function):
    """Fail unless a function raises such an error on every rank."""
    try:
        function()
    except Exception as error:
        found = type(error) is kind and text in str(error), repr(error)
    else:
        found = False, "no error"
    assert all(right for right, _ in everywhere(found)), everywhere(found)


class Counts(keras.callbacks.Callback):
    """Counts batches, and calls a function after each and after each epoch."""

    def __init__(self, after_batch=None, after_epoch=None):
        super().__init__()
        self.batches, self.after_batch, self.after_epoch = 0, after_batch, after_epoch

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if self.after_batch:
            self.after_batch(self)

    def on_epoch_end(self, epoch, logs=None):
        if self.after_epoch:
            self.after_epoch(self)


class Chiefs(Counts):
    chief_only = True
