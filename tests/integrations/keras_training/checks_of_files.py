"""Files of Keras' training on several ranks: models, backups and checkpoints, and errors between them."""

import shutil
import sys

import checking
import keras
import numpy as np
from checking import FIT, RANK, RANKS, Chiefs, Counts, X, Y, alike, everywhere, folder, made, refused
from keras import layers, ops

import mpistrat
from mpistrat.experimental import PreemptionCheckpointHandler, TerminationConfig
from mpistrat.training import Checkpoint


def saving():
    """The chief writes, the others wait, and all raise if it cannot."""
    model, writers = made(), []
    save_on_all = Counts(after_epoch=lambda counts: counts.model.save_weights(folder / "all.weights.h5"))
    model.fit(X, Y, epochs=2, callbacks=[save_on_all], **FIT)
    assert (folder / "all.weights.h5").exists()
    again = made(seed=2)
    chief = Chiefs(after_epoch=lambda counts: again.save_weights(folder / "other.weights.h5"))  # of another model
    made().fit(X, Y, epochs=1, callbacks=[chief], **FIT)
    assert RANK or (folder / "other.weights.h5").exists()
    again.load_weights(folder / "all.weights.h5")
    for mine, kept in zip(model.get_weights(), again.get_weights(), strict=True):
        assert np.array_equal(mine, kept)

    class Noted(keras.Sequential):
        def get_config(self):
            writers.append(RANK)
            return super().get_config()

    noted = Noted([keras.Input((4,)), layers.Dense(1)])
    noted.save(folder / "noted.keras")
    keras.saving.save_model(noted, folder / "noted again.keras")
    keras.saving.save_weights(noted, folder / "noted.weights.h5")
    assert everywhere(len(writers) > 0) == [each == 0 for each in range(RANKS)]
    assert (folder / "noted again.keras").exists()
    (folder / "file").touch()
    refused(NotADirectoryError, "file", lambda: model.save_weights(folder / "file" / "x.weights.h5"))
    refused(ValueError, "", lambda: model.save(folder / "x.unknown"))


def backup():
    """Training goes on where it ended, on any number of ranks: there, also in the order of the rows."""

    class Broken(Counts):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    def train(on_ranks, *callbacks):
        with (checking.strategy if on_ranks else mpistrat.OneDeviceStrategy("cpu")).scope():
            model = made(optimizer=keras.optimizers.Adam(0.01))
            try:
                model.fit(X, Y, epochs=4, callbacks=[*callbacks], **{**FIT, "shuffle": True})
            except KeyboardInterrupt:
                return None
        return model

    def keep(name):
        return keras.callbacks.BackupAndRestore(folder / name, delete_checkpoint=False)

    whole = train(True)
    assert train(True, Broken(), keep("backup")) is None
    if RANK == 0:
        shutil.copytree(folder / "backup", folder / "for one")
        assert train(False, Broken(), keep("of one")) is None
    checking.strategy.barrier()
    found = [train(True, keep("backup")), train(True, keep("of one"))]
    if RANK == 0:
        found.append(train(False, keep("for one")))
    checking.strategy.barrier()
    for model in found:
        for one, other in zip(whole.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)


def restored_with_its_state():
    """Of a layer that computes with numbers beside its variables, and of an optimizer that is the model's attribute."""

    has_tensorflow = sys.modules.get("tensorflow", sys) is not None  # which Keras' Normalization asks for

    def fitted(adapts, epochs):
        keras.utils.set_random_seed(1)
        norm = layers.Normalization() if has_tensorflow else layers.Identity()
        model = keras.Sequential([keras.Input((4,)), norm, layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
        model.other = keras.optimizers.Adam()
        model.other.build(model.trainable_variables)
        if adapts:
            if has_tensorflow:
                norm.adapt(5 * X + 10)
            model.other.iterations.assign(7)
        kept = keras.callbacks.BackupAndRestore(folder / "with_state", delete_checkpoint=False)
        model.fit(5 * X + 10 if has_tensorflow else X, Y, epochs=epochs, callbacks=[kept], **FIT)
        return model

    fitted(True, 2)
    model = fitted(False, 3)
    assert alike(model)
    assert not has_tensorflow or np.allclose(
        model.layers[0](np.array(5 * X + 10)), (X - X.mean(0)) / X.std(0), atol=1e-3
    )
    assert everywhere(int(ops.convert_to_numpy(model.other.iterations.value))) == [7] * RANKS


def backup_that_ends_anywhere():
    """Wherever it ends, the last backup or the new one is whole."""

    class End(BaseException):
        pass

    left, found = [0], []

    def look(event, args):
        """Raise before the file operation whose turn it is."""
        if left[0] > 0 and event in ("open", "os.rename") and str(folder) in str(args[0]):
            left[0] -= 1
            if left[0] == 0:
                raise End

    sys.addaudithook(look)  # stays, and does nothing while `left` is 0
    if RANK == 0:
        model = made()
        for operation in range(1, 40):
            for double in (False, True):
                callback = keras.callbacks.BackupAndRestore(folder / f"{operation}{double}", double_checkpoint=double)
                callback.set_model(model)
                for epoch in (1, 2):
                    model.set_weights([np.full_like(each, epoch) for each in model.get_weights()])
                    left[0] = operation * (epoch == 2)
                    try:
                        callback.on_epoch_end(epoch - 1)
                        ended = False
                    except End:
                        ended = True
                left[0] = 0
                again = keras.callbacks.BackupAndRestore(callback.backup_dir, double_checkpoint=double)
                again.set_model(model)
                again.on_train_begin()
                epoch = model._initial_epoch
                found.append(epoch)
                assert ended or epoch == 2
                assert all(np.all(each == epoch) for each in model.get_weights()), (operation, double, epoch)
                again.on_train_end()
                assert not callback.backup_dir.exists()
            if not ended:
                break
        assert not ended
        assert {*found} == {1, 2}
        assert operation > 4


def preemption():
    """A checkpoint of `PreemptionCheckpointHandler` holds variables of Keras, for any number of ranks."""

    def trained(on_ranks, name, until=None):
        with (checking.strategy if on_ranks else mpistrat.OneDeviceStrategy("cpu")).scope():
            model = made(optimizer=keras.optimizers.Adam(0.01))
            model.optimizer.build(model.trainable_variables)
            kept = Checkpoint(model=model.variables, optimizer=model.optimizer.variables)
            config = TerminationConfig(termination_watcher_fn=lambda: len(done) == until, exit_fn=lambda: None)
            handler = PreemptionCheckpointHandler(None, kept, folder / name, config)
            done = []
            for number in range(int(model.optimizer.iterations.numpy()), 6):
                rows = slice(number * 6, number * 6 + 6)
                handler.run(model.train_on_batch, X[rows], Y[rows])
                done.append(number)
        return done, model.get_weights()

    numbers, whole = trained(True, "whole")
    assert numbers == [*range(6)]
    trained(True, "preempted", until=3)
    if RANK == 0:
        numbers, found = trained(False, "preempted")
        assert numbers == [3, 4, 5]
        for one, other in zip(whole, found, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)


FILES = [saving, backup, restored_with_its_state, backup_that_ends_anywhere, preemption]
