"""Training of which one rank fails: ``faults.py KIND``. It must end with the error of that rank, or raise on all."""

import sys

import keras
import numpy as np
from keras import layers

import mpistrat
import mpistrat.integrations.keras  # trains over ranks
from mpistrat.runtime.agreement.operation import MismatchError

KIND = sys.argv[1]
strategy = mpistrat.MultiWorkerMirroredStrategy()
LAST = strategy.comm.rank == strategy.num_replicas_in_sync - 1
X, Y = np.ones((40, 4), "f"), np.ones((40, 1), "f")


def fail(where):
    if LAST and where == KIND:
        raise RuntimeError(f"a failure in {where}")


class Callback(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            fail("callback")

    def on_epoch_end(self, epoch, logs=None):
        fail("epoch")


class Metric(keras.metrics.Mean):
    def update_state(self, y_true, y_pred, sample_weight=None):
        fail("metric")
        super().update_state(y_true - y_pred)


def batches():
    for step in range(10):
        if step == 7:
            fail("data")
            if LAST and KIND == "fewer":
                return
        yield X[:8], Y[:8]


with strategy.scope():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[Metric(name="own")])
    try:
        model.fit(batches(), epochs=1, verbose=0, callbacks=[Callback()])
    except MismatchError as error:
        print("raised on this rank:", type(error).__name__, flush=True)
        raise
print("trained")
