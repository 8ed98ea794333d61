"""Training of which one rank fails: ``faults.py KIND RANK [FOLDER]``.

It must end with the error of that rank, or raise on all. After ``killed``, ``resumed`` goes on from the backup.
``faults.py caught`` is a program that catches the error of each kind, on the first rank or on the last.
"""

import contextlib
import os
import pathlib
import signal
import sys
import threading
import time

import keras
import numpy as np
from keras import layers
from mpi4py import MPI

import mpistrat
import mpistrat.integrations.keras  # trains over ranks
from mpistrat.runtime.agreement.operation import MismatchError

KIND = sys.argv[1]
strategy = mpistrat.MultiWorkerMirroredStrategy()
RANK, RANKS = strategy.comm.rank, strategy.comm.size
FAILS = KIND != "caught" and int(sys.argv[2]) == RANK
X, Y = np.ones((40, 4), "f"), np.ones((40, 1), "f")


def fail(where):
    if FAILS and where == KIND:
        raise RuntimeError(f"a failure in {where}")


class Callback(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            fail("callback")

    def on_epoch_end(self, epoch, logs=None):
        fail("epoch")


class OfTheChief(keras.callbacks.Callback):
    chief_only = True

    def on_epoch_end(self, epoch, logs=None):
        if KIND == "alone":
            self.model.evaluate(X, Y, verbose=0)


class Backup(keras.callbacks.BackupAndRestore):
    """After a few backups, the chief lets the rank that fails know, which is killed within 4 ms."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 3 and KIND == "killed":
            start.touch()
        super().on_epoch_end(epoch, logs)


def be_killed():
    while not start.exists():
        time.sleep(0.001)
    time.sleep(int.from_bytes(os.urandom(2), "big") / 2**16 * 0.004)
    os.kill(os.getpid(), signal.SIGKILL)


class Metric(keras.metrics.Mean):
    def update_state(self, y_true, y_pred, sample_weight=None):
        fail("metric")
        super().update_state(y_true - y_pred)


def batches():
    for step in range(10):
        if step == 7:
            fail("data")
            if FAILS and KIND == "fewer":
                return
        yield X[:8], Y[:8]


if KIND in ("killed", "resumed"):
    folder = pathlib.Path(sys.argv[3])
    start = folder / "start"
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), layers.Dense(1, kernel_initializer="zeros", name="dense")])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    if KIND == "killed" and FAILS:
        threading.Thread(target=be_killed, daemon=True).start()
    epochs = []

    def note(epoch, logs):
        epochs.append(epoch)
        print("epoch", epoch, flush=True)
        model.stop_training = KIND == "resumed" and len(epochs) == 5

    note = keras.callbacks.LambdaCallback(on_epoch_end=note)
    model.fit(X, Y, batch_size=40, epochs=4000, verbose=0, callbacks=[Backup(folder / "backup"), note])
    steps = int(model.optimizer.iterations.numpy())
    assert steps == epochs[-1] + 1 == epochs[0] + 5 >= 8
    expected, weights = np.zeros(5), np.concatenate([each.ravel() for each in model.get_weights()])
    for _ in range(steps):  # all rows are ones
        expected -= 0.01 * 2 * (expected.sum() - 1)
    np.testing.assert_allclose(weights, expected, atol=1e-6)
    print("resumed")
    sys.exit()


def train():
    own = mpistrat.MultiWorkerMirroredStrategy(comm=MPI.COMM_WORLD.Dup())  # an error leaves ranks out of step
    with own.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[Metric(name="own")])
        try:
            model.fit(batches(), epochs=1, verbose=0, callbacks=[Callback(), OfTheChief()])
        except MismatchError as error:
            print("raised on this rank:", type(error).__name__, flush=True)
            raise
        except RuntimeError:
            if len(sys.argv) > 2:
                raise
            with contextlib.suppress(MismatchError):
                own.barrier()  # the next collective tells the other ranks
            raise


def caught():
    """No rank hangs, and each learns what was wrong."""
    global KIND, FAILS
    for KIND, rank in (("callback", -1), ("epoch", 0), ("data", 0), ("metric", -1), ("fewer", 0), ("alone", 0)):
        FAILS = rank % RANKS == RANK
        found = None
        try:
            train()
        except RuntimeError as error:
            found = error
        told = {"fewer": "", "alone": "was called by a callback of the chief alone"}.get(KIND, f"a failure in {KIND}")
        of_others = KIND == "fewer" or not FAILS
        right = isinstance(found, MismatchError) if of_others else type(found) is RuntimeError and told in str(found)
        assert all(strategy.comm.allgather(right)), (KIND, found)
    print("all faults were told")


if KIND == "caught":
    caught()
else:
    train()
    print("trained")
