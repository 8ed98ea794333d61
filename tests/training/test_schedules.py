"""Schedules of learning rates, against the formulas of Keras' documentation."""

import numpy as np
import pytest

import mpistrat
from mpistrat.optimizers.schedules import (
    CosineDecay,
    CosineDecayRestarts,
    ExponentialDecay,
    InverseTimeDecay,
    LearningRateSchedule,
    PiecewiseConstantDecay,
    PolynomialDecay,
)

STEPS = np.arange(100)


def cosine(progress):
    return 0.5 * (1 + np.cos(np.pi * progress))


def polynomial_in_cycles(step):
    length = 30 * np.maximum(1, np.ceil(step / 30))
    return 0.4 * (1 - step / length) ** 2 + 0.1


def with_warm_up(step):
    rise = 0.1 + 0.4 * step / 10
    return np.where(step < 10, rise, 0.5 * (0.9 * cosine(np.minimum(step - 10, 50) / 50) + 0.1))


def with_restarts(step):
    restarts = np.floor(np.log2(step / 7 + 1) + 1e-9)
    progress = (step / 7 - (2**restarts - 1)) / 2**restarts
    return 0.5 * (0.8 * 0.9**restarts * cosine(progress) + 0.2)


CASES = {
    "exponential": (ExponentialDecay(0.5, 10, 0.9), lambda s: 0.5 * 0.9 ** (s / 10)),
    "exponential stairs": (ExponentialDecay(0.5, 10, 0.9, staircase=True), lambda s: 0.5 * 0.9 ** (s // 10)),
    "inverse time": (InverseTimeDecay(0.5, 10, 0.9), lambda s: 0.5 / (1 + 0.9 * s / 10)),
    "inverse time stairs": (InverseTimeDecay(0.5, 10, 0.9, True), lambda s: 0.5 / (1 + 0.9 * (s // 10))),
    "constants": (
        PiecewiseConstantDecay([10, 20], [0.5, 0.2, 0.1]),
        lambda s: np.where(s <= 10, 0.5, np.where(s <= 20, 0.2, 0.1)),
    ),
    "polynomial": (PolynomialDecay(0.5, 30, 0.1, power=2.0), lambda s: 0.4 * (1 - np.minimum(s, 30) / 30) ** 2 + 0.1),
    "polynomial in cycles": (PolynomialDecay(0.5, 30, 0.1, power=2.0, cycle=True), polynomial_in_cycles),
    "cosine": (CosineDecay(0.5, 50, alpha=0.1), lambda s: 0.5 * (0.9 * cosine(np.minimum(s, 50) / 50) + 0.1)),
    "warm-up": (CosineDecay(0.1, 50, 0.1, warmup_target=0.5, warmup_steps=10), with_warm_up),
    "restarts": (CosineDecayRestarts(0.5, 7, m_mul=0.9, alpha=0.2), with_restarts),
    "equal restarts": (CosineDecayRestarts(0.5, 7, t_mul=1.0), lambda s: 0.5 * cosine(s % 7 / 7)),
}


@pytest.mark.parametrize("name", CASES)
def test_as_the_formula(name):
    schedule, formula = CASES[name]
    np.testing.assert_allclose([schedule(step) for step in STEPS], formula(STEPS), rtol=1e-12, atol=1e-15)
    assert isinstance(schedule, LearningRateSchedule)
    assert type(schedule)(**schedule.get_config()) == schedule


def test_an_optimizer_follows_it():
    v = mpistrat.Variable(0.0)
    optimizer = mpistrat.optimizers.SGD(PiecewiseConstantDecay([1], [1.0, 10.0]))
    strategy = mpistrat.get_strategy()
    for _ in range(3):
        strategy.run(lambda: optimizer.apply_gradients([(1.0, v)]))
    assert float(v) == -12.0
    assert "PiecewiseConstantDecay(boundaries=[1]" in repr(optimizer)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ExponentialDecay(0.1, 0, 0.9),
        lambda: CosineDecay(0.1, -1),
        lambda: CosineDecayRestarts(0.1, 10, t_mul=0.5),
        lambda: PiecewiseConstantDecay([1, 2], [0.1, 0.2]),
        lambda: PiecewiseConstantDecay([2, 1], [0.1, 0.2, 0.3]),
    ],
)
def test_misuse(make):
    with pytest.raises(ValueError, match="must"):
        make()
