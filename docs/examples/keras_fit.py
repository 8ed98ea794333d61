"""Train a network on digits with Keras' Model.fit, on the ranks of MPI and the backend of KERAS_BACKEND.

    KERAS_BACKEND=torch python docs/examples/keras_fit.py
    KERAS_BACKEND=torch mpistrat run -n 4 docs/examples/keras_fit.py

The losses are the same on any number of ranks, up to the rounding of float32.
"""

import keras
import numpy as np
from sklearn.datasets import load_digits

import mpistrat
import mpistrat.integrations.keras  # lets Keras train over ranks


def main():
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


if __name__ == "__main__":
    main()
