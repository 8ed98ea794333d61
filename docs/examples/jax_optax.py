"""Train a network on handwritten digits: JAX computes the gradients, and optax makes the steps.

    python docs/examples/jax_optax.py
    mpistrat run -n 4 docs/examples/jax_optax.py

The losses are the same on any number of ranks, up to the rounding of float32.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import mpistrat

BATCH, EPOCHS = 100, 10


def init(key, sizes):
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"w": jax.random.normal(k, (m, n)) * jnp.sqrt(2 / m), "b": jnp.zeros(n)}
        for k, m, n in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def logits(params, x):
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def loss(params, x, y):
    """Return the loss, summed over the rows of x: sums are right for parts of any length."""
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).sum()


def main():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    digits = load_digits()
    x, y = (digits.data / 16).astype(np.float32), digits.target
    Dataset = mpistrat.data.Dataset
    train = Dataset.from_tensor_slices((x[:1437], y[:1437])).shuffle(1437, seed=0)
    train = strategy.experimental_distribute_dataset(train.batch(BATCH, drop_remainder=True))
    test = strategy.experimental_distribute_dataset(Dataset.from_tensor_slices((x[1437:], y[1437:])).batch(BATCH))

    optimizer = optax.adam(optax.cosine_decay_schedule(0.005, EPOCHS * train.cardinality))
    params = init(jax.random.key(0), (64, 64, 10))  # the same key on all ranks: the same weights
    state = optimizer.init(params)
    loss_and_gradients = jax.jit(jax.value_and_grad(loss))

    @jax.jit
    def update(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    def train_step(x, y):
        mine = loss_and_gradients(params, x, y)
        return mpistrat.get_replica_context().all_reduce("SUM", mine)

    history = mpistrat.training.History()
    for epoch in range(EPOCHS):
        losses = []
        for batch in train:
            value, gradients = strategy.run(train_step, args=batch)
            gradients = jax.tree.map(lambda g: g / BATCH, gradients)
            params, state = update(params, state, gradients)
            losses.append(value / BATCH)
        history.log(epoch=epoch, loss=np.mean(losses))

    with strategy.scope():
        metric = mpistrat.metrics.Accuracy()
    for batch in test:
        strategy.run(lambda x, y: metric.update_state(y, logits(params, x).argmax(1)), args=batch)
    accuracy = metric.result()  # collective: all ranks call it
    if strategy.is_chief:
        print(f"test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
