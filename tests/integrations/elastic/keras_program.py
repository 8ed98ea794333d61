"""Keras' `fit` that loses ranks: ``keras_program.py DIRECTORY INPUT LOSSES``, under ``mpistrat run --elastic``.

LOSSES is JSON: for each run the place at which ranks are killed, and these ranks. The last run trains again, without a
loss and without the callback. It prints whether weights, optimizer and logs are the same bits.
"""

import json
import os
import pathlib
import signal
import sys

import keras
import numpy as np
from keras import layers

import mpistrat
from mpistrat.integrations.keras import ElasticCallback

folder, kind, losses = pathlib.Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
run = int(os.environ["MPISTRAT_RESTART"])
place, ranks = losses[run] if len(losses) > run else ("nowhere", [])
strategy = mpistrat.MultiWorkerMirroredStrategy()
x = np.random.default_rng(0).normal(size=(46, 3)).astype("f")
y = (x @ np.array([[1], [2], [-1]])).astype("f")


class Batches(keras.utils.PyDataset):
    """Keras draws their order by Python's generator, and they draw noise by NumPy's."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        rows = slice(8 * index, 8 * index + 8)
        return x[rows] + np.random.normal(size=(1, 3)).astype("f"), y[rows]  # noqa: NPY002


class Lose(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.logs = []

    def lose(self, here):
        if here == place and strategy.comm.rank in ranks:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        self.lose(f"epoch:{epoch}")

    def on_train_batch_end(self, batch, logs=None):
        self.lose(f"batch:{self.epoch}:{batch}")

    def on_epoch_end(self, epoch, logs=None):
        self.lose(f"end:{epoch}")
        self.logs.append(dict(logs))


def trained(*callbacks):
    """Return the variables of a model after three epochs, and the logs of the last one."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        hidden = [layers.Dense(8, activation="relu"), layers.BatchNormalization(), layers.Dropout(0.3)]
        model = keras.Sequential([keras.Input((3,)), *hidden, layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    given = {
        "arrays": {"x": x, "y": y, "batch_size": 8},
        "batches": {"x": Batches()},
        "dataset": {"x": mpistrat.data.Dataset.from_arrays((x, y)).shuffle(46, seed=1).batch(8)},
    }[kind]
    lose = Lose()
    model.fit(**given, epochs=3, verbose=0, callbacks=[*callbacks, lose], validation_data=(x[:8], y[:8]))
    variables = [*model.variables, *model.optimizer.variables]
    return [np.asarray(keras.ops.convert_to_numpy(each.value)) for each in variables], lose.logs[-1:]


if place == "refused":
    callback = ElasticCallback(folder)
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    ordered = ((x[:8], y[:8]) for _ in range(3))
    for call in (
        lambda: trained(ElasticCallback(folder, copy_share=2)),
        lambda: model.fit(ordered, callbacks=[callback]),
        lambda: model.fit(x, y, steps_per_epoch=2, callbacks=keras.callbacks.CallbackList([callback])),
    ):
        try:
            with strategy.scope():
                call()
        except ValueError as error:
            print(error, flush=True)
    sys.exit()
if place == "stopped early":
    early = keras.callbacks.EarlyStopping("loss", min_delta=1e9)
    first, logs = trained(early, ElasticCallback(folder))
    second, more = trained(early, ElasticCallback(folder))
    same = all(np.array_equal(*pair) for pair in zip(first, second, strict=True))
    print(f"same {same}, epochs after the end {len(more)}", flush=True)
    sys.exit()
resumed, logs = trained(ElasticCallback(folder, copy_share=1))
Lose.lose = lambda self, here: None
alone, expected = trained()
same = all(np.array_equal(*pair) for pair in zip(resumed, alone, strict=True))
if strategy.comm.rank == 0:
    print(f"run {run}: variables {same}, logs {logs == expected or logs}", flush=True)
