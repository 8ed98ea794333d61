"""Joined variables are updated block by block, and an optimizer may be derived in any way."""

import numpy as np
import pytest

import mpistrat
from mpistrat.optimizers import SGD, Adam

SHAPES = [(100, 100)] * 7 + [(3,), (9001,)]  # 79,004 elements: two blocks


def steps(strategy, optimizer, shapes=SHAPES, count=3):
    """Return the variables after some steps with equal gradients on all ranks, as one array."""
    random = np.random.default_rng(0)
    with strategy.scope():
        variables = [mpistrat.Variable(random.standard_normal(shape).astype(np.float32)) for shape in shapes]
    for _ in range(count):
        gradients = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
        pairs = list(zip(gradients, variables, strict=True))
        strategy.run(optimizer.apply_gradients, (pairs,))
    return np.concatenate([variable.numpy() for variable in variables], axis=None)


@pytest.mark.parametrize(
    "make",
    [
        lambda of: of(SGD)(0.1),
        lambda of: of(SGD)(0.1, momentum=0.9, nesterov=True),
        lambda of: of(Adam)(0.1, amsgrad=True, weight_decay=0.1),
        lambda of: of(Adam)(0.1, use_ema=True, ema_overwrite_frequency=2),
        lambda of: of(Adam)(lambda step: 0.1 / (step + 1), global_clipnorm=0.5),
    ],
)
def test_bits(strategy, make):
    separate = make(lambda kind: type(kind.__name__, (kind,), {"elementwise": False}))
    np.testing.assert_array_equal(steps(strategy, make(lambda kind: kind)), steps(strategy, separate))


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_an_update_that_calls_its_class(strategy, kind):
    sizes = []

    class Derived(kind):
        elementwise = True

        def update(self, weights, gradient, step, rate, *state):
            sizes.append(weights.size)
            super().update(weights, gradient, step, rate, *state)

    np.testing.assert_array_equal(steps(strategy, Derived(0.1)), steps(strategy, kind(0.1)))
    assert max(sizes[len(SHAPES) :]) <= 1 << 16
    assert sum(sizes) == 3 * sum(map(np.prod, SHAPES))
