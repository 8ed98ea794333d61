"""An optimizer outside of the package gets arrays of one shape, whatever the shape of the variable."""

import numpy as np
import pytest

import mpistrat


class Lion(mpistrat.optimizers.Optimizer):
    slots = ("momentum",)

    def update(self, weights, gradient, step, rate, *state):
        (momentum,) = state
        assert weights.shape == gradient.shape == momentum.shape
        weights -= rate * np.sign(0.9 * momentum + 0.1 * gradient)
        momentum *= 0.99
        momentum += 0.01 * gradient


class ElementwiseLion(Lion):
    elementwise = True


@pytest.mark.parametrize("kind", [Lion, ElementwiseLion])
@pytest.mark.parametrize("shapes", [[()], [(3,)], [(2, 3)], [(), (3,), (2, 1)]])
def test_update(kind, shapes):
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    with strategy.scope():
        variables = [mpistrat.Variable(np.ones(shape)) for shape in shapes]
    optimizer = kind(0.25)
    for _ in range(2):
        gradients = [np.full(shape, 2.0).T.copy().T for shape in shapes]
        strategy.run(lambda g=gradients: optimizer.apply_gradients(zip(g, variables, strict=True)))
    for variable, shape in zip(variables, shapes, strict=True):
        np.testing.assert_array_equal(variable.read_value(), np.full(shape, 0.5))
