"""Models of Keras that are made, compiled or trained in a scope, on any number of ranks."""

import keras
import numpy as np

import mpistrat

strategy = mpistrat.MultiWorkerMirroredStrategy()
X, Y = np.ones((4, 3), np.float32), np.ones((4, 1), np.float32)


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)


def functional():
    x = keras.Input((3,))
    return keras.Model(x, keras.layers.Dense(1)(x))


def sequential():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


def cloned():
    return keras.models.clone_model(plain)


def trained(make, where, method):
    """Train a model of which one step is in the scope. Return the error, or None."""

    def step(name, function):
        if name != where:
            return function()
        with strategy.scope():
            return function()

    try:
        model = step("made", make)
        step("compiled", lambda: model.compile("sgd", "mse"))
        verbose = {"verbose": 0} if method == "fit" else {}
        step("trained", lambda: getattr(model, method)(X, Y, **verbose))
    except RuntimeError as error:
        return error
    return None


plain = sequential()
for make in (Own, functional, sequential, cloned):
    for where in ("made", "compiled", "trained", "nowhere"):
        for method in ("fit", "train_on_batch"):
            error = trained(make, where, method)
            if where == "nowhere" or strategy.num_replicas_in_sync == 1:
                assert error is None, error
            else:
                assert f".{method}: Keras' training would fit another model on each of" in str(error), (make, where)
                assert "all_reduce" in str(error)
print("all checks passed")
