"""Train a convolutional network of Keras: TensorFlow's tutorial on custom training loops, with the ranks of MPI.

    python docs/examples/keras_gradienttape.py
    mpistrat run -n 4 docs/examples/keras_gradienttape.py

The losses are the same on any number of ranks, up to the rounding of float32.
"""

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import mpistrat

BATCH, EPOCHS = 64, 6


def create_model():
    return tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 1)),
            tf.keras.layers.Conv2D(16, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )


def main():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    tf.keras.utils.set_random_seed(0)
    digits = load_digits()
    x, y = (digits.images[..., None] / 16).astype(np.float32), digits.target
    train = mpistrat.data.Dataset.from_tensor_slices((x[:1437], y[:1437])).shuffle(1437, seed=0).batch(BATCH)
    test = mpistrat.data.Dataset.from_tensor_slices((x[1437:], y[1437:])).batch(BATCH)
    train_dist = strategy.experimental_distribute_dataset(train)
    test_dist = strategy.experimental_distribute_dataset(test)

    model = create_model()
    model.set_weights(strategy.broadcast(model.get_weights()))  # those of rank 0
    optimizer = tf.keras.optimizers.Adam(0.002)
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    with strategy.scope():
        test_loss = mpistrat.metrics.Mean()
        train_accuracy = mpistrat.metrics.Accuracy()
        test_accuracy = mpistrat.metrics.Accuracy()

    @tf.function
    def gradients_of(images, labels):
        with tf.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = tf.reduce_sum(loss_object(labels, predictions))  # sums are right for parts of any length
        return loss, predictions, tape.gradient(loss, model.trainable_variables)

    def train_step(images, labels):
        replica = mpistrat.get_replica_context()
        loss, predictions, gradients = gradients_of(images, labels)
        train_accuracy.update_state(labels, tf.argmax(predictions, 1))
        loss, gradients, examples = replica.all_reduce("SUM", (loss, gradients, len(labels)))
        optimizer.apply_gradients(zip([g / examples for g in gradients], model.trainable_variables, strict=True))
        return loss / examples

    def test_step(images, labels):
        predictions = model(images, training=False)
        test_loss.update_state(loss_object(labels, predictions))
        test_accuracy.update_state(labels, tf.argmax(predictions, 1))

    history = mpistrat.training.History(monitor="val_accuracy", mode="max")
    for epoch in range(EPOCHS):
        total, batches = 0.0, 0
        for batch in train_dist:
            total += strategy.run(train_step, args=batch)
            batches += 1
        for batch in test_dist:
            strategy.run(test_step, args=batch)
        history.log(
            epoch=epoch,
            loss=total / batches,
            accuracy=train_accuracy.result(),
            val_loss=test_loss.result(),
            val_accuracy=test_accuracy.result(),
        )
        for metric in (test_loss, train_accuracy, test_accuracy):
            metric.reset_state()


if __name__ == "__main__":
    main()
