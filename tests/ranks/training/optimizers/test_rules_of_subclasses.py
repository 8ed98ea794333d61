"""What holds only for the `update` of a class does not outlive an override, and initial states are those of rank 0."""

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.optimizers import SGD, Adagrad, Adam, Optimizer
from mpistrat.values import IndexedSlices

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


class Twice:
    """A mixin for SGD."""

    def update(self, weights, gradient, step, rate, *state):
        weights -= 2 * rate * gradient


class Mixed(Twice, SGD):
    pass


class MixedElementwise(Twice, SGD):
    elementwise = True


class Other(SGD):
    def update(self, weights, gradient, step, rate, *state):
        weights -= 2 * rate * gradient


class MixedLate(Mixed, Other):
    pass


@pytest.fixture
def strategy():
    return mpistrat.MultiWorkerMirroredStrategy()


@pytest.mark.parametrize("kind", [Mixed, MixedElementwise, Other, MixedLate])
def test_small_and_large_variables_and_rows_get_the_same_update(strategy, kind):
    with strategy.scope():
        variables = [mpistrat.Variable(np.zeros(n)) for n in (3, 5, 40_000, 2)]
    gradients = [np.ones(v.shape) for v in variables[:3]]
    gradients.append(IndexedSlices(np.ones(2), np.arange(2), (2,)))
    optimizer = kind(0.25)
    for given in (gradients, gradients, gradients[:3]):
        strategy.run(lambda g=given: optimizer.apply_gradients(zip(g, variables, strict=False)))
    for variable, steps in zip(variables, (3, 3, 3, 2), strict=True):
        np.testing.assert_array_equal(variable.read_value(), np.full(variable.shape, -0.5 * SIZE * steps))


def test_an_override_has_no_kernel_of_another_update():
    assert SGD(1.0).on_gpu(1, 1.0) is not None
    assert all(kind(1.0).on_gpu(1, 1.0) is None for kind in (Mixed, MixedElementwise, Other, MixedLate))

    class WithKernel(Twice, SGD):
        on_gpu = SGD.on_gpu

    assert WithKernel(1.0).on_gpu(1, 1.0) is not None


@pytest.mark.parametrize(
    ("kind", "elementwise"), [(SGD, True), (Mixed, False), (MixedElementwise, True), (MixedLate, False)]
)
def test_elementwise_is_said_for_one_update(kind, elementwise):
    assert kind.elementwise is elementwise


@pytest.mark.parametrize("kind", [Adam, Adagrad, lambda rate: SGD(rate, momentum=0.5)])
def test_initial_states_of_a_function_that_is_set_on_an_optimizer(strategy, kind):
    optimizer = kind(0.5)
    optimizer.initial_state = lambda slot, variable: np.full(variable.shape, 1.0 + RANK)
    with strategy.scope():
        variables = [mpistrat.Variable(np.zeros(n)) for n in (3, 40_000)]
    optimizer.build(variables)
    for slot in optimizer.variables[2:]:
        np.testing.assert_array_equal(slot.read_value(), np.ones(slot.shape))
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(v.shape), v) for v in variables]))
    for variable in variables:
        own = MPI.COMM_WORLD.allgather(variable.read_value())
        assert all(np.array_equal(own[0], each) for each in own)


@pytest.mark.skipif(SIZE == 1, reason="there are no ranks that could differ")
def test_a_function_that_is_set_on_one_rank_only(strategy):
    optimizer = Adam(0.5)
    if RANK == 0:
        optimizer.initial_state = lambda slot, variable: Optimizer.initial_state(optimizer, slot, variable)
    with strategy.scope():
        variable = mpistrat.Variable(np.zeros(3))
    with pytest.raises(RuntimeError, match="the state of an optimizer"):
        optimizer.build([variable])
