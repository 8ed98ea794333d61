"""The models and the inputs of the rows of parity.py."""

import pathlib
import tempfile

import keras
import numpy as np
from keras import layers, ops, optimizers

import mpistrat
import mpistrat.integrations.keras  # trains over ranks
from mpistrat.data import Dataset

BACKEND = keras.backend.backend()
strategy = mpistrat.MultiWorkerMirroredStrategy()
RANKS = strategy.num_replicas_in_sync
random = np.random.default_rng(0)
ROWS = 77
X = random.normal(size=(ROWS, 6)).astype("f")
Y = (X[:, :1] * 2 + X[:, 1:2] + 0.1 * random.normal(size=(ROWS, 1))).astype("f")
CLASS = (X[:, 0] > 0).astype("int32") + (X[:, 1] > 0.5).astype("int32")
TOKENS = random.integers(1, 12, size=(ROWS, 7)) * (np.arange(7) < random.integers(1, 8, size=(ROWS, 1)))
TOKENS = TOKENS.astype("int32")
NEXT = ((TOKENS * 5 + 1) % 12).astype("int32")
IMAGES = random.normal(size=(ROWS, 6, 6, 2)).astype("f") * [1, 3] + [0.5, 0]
WEIGHTS = random.uniform(0.1, 3, size=ROWS).astype("f")
WEIGHTS[::5] = 0


# --- models ----------------------------------------------------------------------------


def dense(**more):
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, activation="tanh", kernel_regularizer="l2", **more), layers.Dense(1)]
    )


def classes():
    return keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(3)])


def tokens(recurrent=True):
    x = keras.Input((7,), dtype="int32")
    y = layers.Embedding(12, 5, mask_zero=True)(x)
    if recurrent:
        y = layers.LSTM(6, return_sequences=True)(y)
    return keras.Model(x, layers.Dense(12)(y))


def embedded():
    return keras.Sequential(
        [keras.Input((7,), dtype="int32"), layers.Embedding(12, 4), layers.GlobalAveragePooling1D(), layers.Dense(1)]
    )


def outputs():
    x = keras.Input((6,))
    y = layers.Dense(8, activation="tanh")(x)
    return keras.Model(x, {"a": layers.Dense(1, name="a")(y), "b": layers.Dense(3, name="b")(y)})


def images(norm):
    x = keras.Input((6, 6, 2))
    y = layers.Conv2D(4, 3)(x)
    y = layers.Activation("relu")(norm()(y))
    return keras.Model(x, layers.Dense(1)(layers.GlobalAveragePooling2D()(y)))


class Own(keras.Model):
    """A subclass, with a loss of its own."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(8, activation="tanh")
        self.outer = layers.Dense(1)

    def call(self, x):
        y = self.inner(x)
        self.add_loss(0.01 * ops.mean(ops.square(y)))
        return self.outer(y)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.abs(y - y_pred)) + sum(self.losses)


class OwnStep(keras.Model):
    """A step of its own, for each backend. With a metric, where that is simple, and a log that is none."""

    def train_step(self, *args):
        if BACKEND == "jax":
            import jax

            state, (x, y) = args

            def loss_of(weights, fixed):
                out, fixed = self.stateless_call(weights, fixed, x, training=True)
                return ops.mean(ops.square(out - y)), fixed

            (loss, fixed), gradients = jax.value_and_grad(loss_of, has_aux=True)(state[0], state[1])
            weights, optimizer = self.optimizer.stateless_apply(state[2], gradients, state[0])
            return {"own": loss}, (weights, fixed, optimizer, state[3])
        ((x, y),) = args
        weights = self.trainable_variables
        if BACKEND == "torch":
            import torch

            self.zero_grad()
            squares = ops.square(self(x, training=True) - y)
            loss = ops.mean(squares)
            loss.backward()
            with torch.no_grad():
                self.optimizer.apply([each.value.grad for each in weights], weights)
        else:
            import tensorflow as tf

            with tf.GradientTape() as tape:
                squares = ops.square(self(x, training=True) - y)
                loss = ops.mean(squares)
            self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.of_rows.update_state(squares)
        return {"own": loss, "of_rows": self.of_rows.result()}


def own_step():
    x = keras.Input((6,))
    model = OwnStep(x, layers.Dense(1)(layers.Dense(8, activation="tanh")(x)))
    model.of_rows = keras.metrics.Mean(name="of_rows")
    return model


class Adversaries(keras.Model):
    """Two models, each with its optimizer. The second one learns from what the first one has just learned."""

    def __init__(self):
        super().__init__()
        self.judge, self.forger = keras.Sequential([layers.Dense(1)]), keras.Sequential([layers.Dense(6)])
        for each in (self.judge, self.forger):
            each.build((None, 6))
        self.of_judge = optimizers.SGD(0.05)
        self.of_judge.build(self.judge.trainable_variables)

    def build(self, shape):
        pass

    def call(self, x):
        return self.judge(self.forger(x))

    def train_step(self, *args):
        (x, noise) = args[-1]
        models, learns = (self.judge, self.forger), (self.of_judge, self.optimizer)

        def of_judge(judge, forger):
            return ops.mean(ops.softplus(-judge(x)) + ops.softplus(judge(forger(noise))))

        def of_forger(judge, forger):
            return ops.mean(ops.softplus(-judge(forger(noise))))

        found = []
        if BACKEND == "jax":
            import jax

            weights = [list(args[0][0][:2]), list(args[0][0][2:])]
            states = [[each.value for each in self.of_judge.variables], args[0][2]]
            for number, loss_of in enumerate((of_judge, of_forger)):

                def of(mine, number=number, loss_of=loss_of):
                    now = [*weights[:number], mine, *weights[number + 1 :]]
                    return loss_of(
                        *(
                            lambda inputs, model=model, values=values: model.stateless_call(values, [], inputs)[0]
                            for model, values in zip(models, now, strict=True)
                        )
                    )

                loss, gradients = jax.value_and_grad(of)(weights[number])
                found.append(loss)
                others = [] if number == 0 else weights[0]  # Keras has built the second optimizer with these, too
                gradients = [*map(ops.zeros_like, others), *gradients]
                new, states[number] = learns[number].stateless_apply(
                    states[number], gradients, [*others, *weights[number]]
                )
                weights[number] = new[len(others) :]
            return dict(zip("ab", found, strict=True)), ([*weights[0], *weights[1]], args[0][1], states[1], args[0][3])
        for model, optimizer, loss_of in zip(models, learns, (of_judge, of_forger), strict=True):
            variables = model.trainable_variables
            if BACKEND == "torch":
                import torch

                self.zero_grad()
                found.append(loss_of(*models))
                found[-1].backward()
                with torch.no_grad():
                    optimizer.apply([each.value.grad for each in variables], variables)
            else:
                import tensorflow as tf

                with tf.GradientTape() as tape:
                    found.append(loss_of(*models))
                optimizer.apply(tape.gradient(found[-1], variables), variables)
        return dict(zip("ab", found, strict=True))


def trained():
    model = dense()
    model.compile("sgd", "mse", metrics=["mae"])
    model.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    return model


def loaded():
    """From a file that the chief has written; outside of a scope, from one of this rank."""
    folder = tempfile.mkdtemp()
    if mpistrat.has_strategy():
        folder = strategy.comm.bcast(folder)
    file = pathlib.Path(folder) / "model.keras"
    trained().save(file)
    return keras.saving.load_model(file)


def frozen():
    model = dense()
    model.layers[0].trainable = False
    return model


def typed(policy):
    def make():
        keras.config.set_dtype_policy(policy)
        try:
            return keras.Sequential(
                [keras.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(1, dtype="float32")]
            )
        finally:
            keras.config.set_dtype_policy("float32")

    return make


def mean_error(y, found):
    """A metric that is one number for each batch, whose mean over batches Keras takes."""
    return ops.mean(ops.abs(y - found))


# --- data ------------------------------------------------------------------------------


# Modulo 2 and 3 ranks each number of rows is there, and so are batches with fewer rows than ranks; on 2 ranks of few
# shapes, which JAX compiles.
SIZES = [18, 17, 1, 2, 3, 19, 17]
PARTS = np.split(np.arange(ROWS), np.cumsum(SIZES)[:-1])


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return len(PARTS)

    def __getitem__(self, i):
        return X[PARTS[i]], Y[PARTS[i]]


def generated():
    while True:
        for part in PARTS:
            yield X[part], Y[part]


def loader():
    import torch

    arrays = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    return torch.utils.data.DataLoader(arrays, batch_sampler=[part.tolist() for part in PARTS])


def tensors():
    import torch

    return torch.from_numpy(X), torch.from_numpy(Y)


def of_jax():
    import jax.numpy as jnp

    return jnp.asarray(X), jnp.asarray(Y)


def tables():
    import pandas as pd

    return pd.DataFrame(X, columns=list("abcdef")), pd.DataFrame({"y": Y[:, 0]})


def read(make):
    """A dataset of mpistrat in a scope; outside, its batches for plain Keras."""

    def data():
        dataset = make()
        return dataset if mpistrat.has_strategy() else (batch for _ in range(9) for batch in dataset)

    return data


def once(steps):
    """The number of steps for plain Keras, which does not know it."""
    return {"steps_per_epoch": lambda: None if mpistrat.has_strategy() else steps}


def by_function(known):
    """Batches of a function for each rank, of which the last ones are empty on some ranks."""

    def make():
        rows, size = Dataset.from_arrays((X[:49] if known else IMAGES[:49], Y[:49])), 16 // RANKS

        def of_pipeline(context):
            own = rows.shard(context.num_input_pipelines, context.input_pipeline_id)
            return (own if known else own.filter(lambda x, y: True)).batch(size)

        if not mpistrat.has_strategy():
            return rows.batch(size * RANKS)
        return strategy.distribute_datasets_from_function(of_pipeline)

    return make


def tf_data():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)
