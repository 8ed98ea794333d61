"""Training that goes on from a checkpoint of variables and optimizer equals training without a break."""

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat import training

SIZE, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
# What TensorFlow answered with two replicas: the variable after four steps, and their number.
RECORDED = -12.5735


def train(strategy, steps, path=None, save=None):
    """Train from the beginning or from a file, and return the variable and the number of steps."""
    with strategy.scope():
        v = mpistrat.Variable(np.array([1.0], np.float32), name="v")
        optimizer = mpistrat.optimizers.SGD(0.5, momentum=0.9)
        optimizer.build([v])
    if path:
        training.load([v, *optimizer.variables], path)
    gradient = np.array([1.0 + RANK], np.float32)
    for _ in range(steps):
        strategy.run(lambda: optimizer.apply_gradients([(gradient, v)]))
    if save:
        training.save([v, *optimizer.variables], save)
    return float(v.read_value()[0]), int(optimizer.iterations)


@pytest.mark.parametrize("make", [mpistrat.MultiWorkerMirroredStrategy, mpistrat.MirroredStrategy])
def test_training_goes_on(make, tmp_path):
    strategy = make()
    path = MPI.COMM_WORLD.bcast(str(tmp_path / "c.h5"))
    total, velocity, expected = sum(range(1, SIZE + 1)), 0.0, 1.0
    for _ in range(4):
        velocity = 0.9 * velocity - 0.5 * total
        expected += velocity
    train(strategy, 2, save=path)
    whole, continued = train(strategy, 4), train(strategy, 2, path)
    assert whole == continued
    assert whole == (pytest.approx(expected, rel=1e-6), 4)
    if SIZE == 2:
        assert round(whole[0], 4) == RECORDED
