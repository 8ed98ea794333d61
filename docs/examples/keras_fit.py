"""Train a network on digits with Keras' Model.fit, on the ranks of MPI and the backend of KERAS_BACKEND.

    KERAS_BACKEND=torch python docs/examples/keras_fit.py
    KERAS_BACKEND=torch mpistrat run -n 4 docs/examples/keras_fit.py --plot epochs.png

The losses are the same on any number of ranks, up to the rounding of float32.
"""

import argparse

import keras
import numpy as np
from sklearn.datasets import load_digits

import mpistrat
import mpistrat.integrations.keras  # lets Keras train over ranks


def plot(history, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        axes.plot(history[name], "o-", label="training")
        axes.plot(history[f"val_{name}"], "o-", label="test")
        axes.set(xlabel="epoch", title=name)
        axes.legend()
    figure.savefig(path, dpi=80)


def main():
    parser = argparse.ArgumentParser(description="Train a network on digits with Keras' Model.fit.")
    parser.add_argument("--plot", metavar="FILE", help="draw the loss and the accuracy of each epoch")
    options = parser.parse_args()
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    digits = load_digits()
    x, y = (digits.images[..., None] / 16).astype(np.float32), digits.target
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(16, 3, use_bias=False),
                mpistrat.integrations.keras.SyncBatchNormalization(),
                keras.layers.Activation("relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.002), loss, metrics=["accuracy"])
    history = model.fit(
        x[:1437],
        y[:1437],
        batch_size=64,  # of all ranks together
        epochs=6,
        validation_data=(x[1437:], y[1437:]),
        callbacks=[keras.callbacks.EarlyStopping(patience=2)],
        verbose=0,
    ).history
    if strategy.is_chief:
        for epoch, (loss, accuracy) in enumerate(zip(history["loss"], history["val_accuracy"], strict=True)):
            print(f"epoch {epoch}  loss {loss:.4f}  test accuracy {accuracy:.4f}")
        if options.plot:
            plot(history, options.plot)


if __name__ == "__main__":
    main()
