"""An optimizer does not change the gradients that it is given, also where it updates in the memory of their sum."""

import numpy as np
import pytest

import mpistrat
from mpistrat.optimizers import SGD, Adam

SHAPES = {"small": [(3, 2), (5,), ()], "one large": [(300, 400), (5,)], "alone": [(2,)]}


class Halving(SGD):
    """A rule of its own in place of that of SGD, which may change the gradient."""

    elementwise = True

    def update(self, weights, gradient, step, rate, *state):
        weights -= gradient * np.float32(rate / 2)


@pytest.mark.parametrize("aggregate", [True, False])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    "make",
    [SGD, lambda: SGD(momentum=0.5), Adam, lambda: SGD(weight_decay=0.1), lambda: SGD(clipnorm=0.1)],
    ids=["sgd", "momentum", "adam", "decay", "clipped"],
)
def test_gradients_stay(make, shapes, aggregate):
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    with strategy.scope():
        variables = [mpistrat.Variable(np.ones(shape, np.float32)) for shape in shapes]
        optimizer = make()
    rng = np.random.default_rng(0)
    gradients = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    before = [gradient.copy() for gradient in gradients]
    for _ in range(3):
        pairs = zip(gradients, variables, strict=True)
        strategy.run(
            lambda pairs: optimizer.apply_gradients(pairs, experimental_aggregate_gradients=aggregate), (pairs,)
        )
    for gradient, copy in zip(gradients, before, strict=True):
        np.testing.assert_array_equal(gradient, copy)


def test_rule_of_a_subclass_is_used():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    with strategy.scope():
        variables = [mpistrat.Variable(np.zeros(3, np.float32)) for _ in range(2)]
        optimizer = Halving(0.5)
    gradients = [np.full(3, 4, np.float32)] * 2
    for _ in range(2):
        strategy.run(lambda: optimizer.apply_gradients(zip(gradients, variables, strict=True)))
    for variable in variables:
        np.testing.assert_array_equal(variable, -2.0 * strategy.num_replicas_in_sync)
