"""Schedules of learning rates: functions of the number of completed steps, by Keras' names."""

from __future__ import annotations

import dataclasses
import itertools
import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpistrat.representation import require


class LearningRateSchedule(ABC):
    """The base class of schedules. A subclass defines ``__call__``.

    Any function of the number of completed steps can be a learning rate. A schedule also shows its arguments.

    Examples
    --------
    >>> import dataclasses, mpistrat
    >>> @dataclasses.dataclass(frozen=True)
    ... class InverseSquareRoot(mpistrat.optimizers.schedules.LearningRateSchedule):
    ...     initial_learning_rate: float
    ...
    ...     def __call__(self, step):
    ...         return self.initial_learning_rate / (step + 1) ** 0.5
    >>> schedule = InverseSquareRoot(0.1)
    >>> schedule(3), schedule.get_config()
    (0.05, {'initial_learning_rate': 0.1})
    """

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Return the learning rate after ``step`` completed steps."""

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that make this schedule again, by name."""
        return dataclasses.asdict(self) if dataclasses.is_dataclass(self) else {}


class _OverSteps(LearningRateSchedule):
    decay_steps: float

    def __post_init__(self) -> None:
        require(self.decay_steps > 0, "decay_steps must be positive", self.decay_steps)


@dataclass(frozen=True)
class _Decay(_OverSteps):
    """A schedule of the progress: the steps, as a multiple of ``decay_steps``."""

    initial_learning_rate: float
    decay_steps: float
    decay_rate: float
    staircase: bool = False

    def _progress(self, step: int) -> float:
        progress = step / self.decay_steps
        return math.floor(progress) if self.staircase else progress


@dataclass(frozen=True)
class ExponentialDecay(_Decay):
    """``initial_learning_rate * decay_rate ** (step / decay_steps)``.

    Parameters
    ----------
    initial_learning_rate, decay_steps, decay_rate : float
    staircase : bool
        Round ``step / decay_steps`` down.
    name : str

    Examples
    --------
    >>> ExponentialDecay(0.1, decay_steps=10, decay_rate=0.5)(20)
    0.025
    """

    name: str = "ExponentialDecay"

    def __call__(self, step: int) -> float:
        return self.initial_learning_rate * self.decay_rate ** self._progress(step)


@dataclass(frozen=True)
class InverseTimeDecay(_Decay):
    """``initial_learning_rate / (1 + decay_rate * step / decay_steps)``.

    Parameters
    ----------
    initial_learning_rate, decay_steps, decay_rate, staircase, name
        As for `ExponentialDecay`.

    Examples
    --------
    >>> InverseTimeDecay(0.1, decay_steps=10, decay_rate=1.0)(30)
    0.025
    """

    name: str = "InverseTimeDecay"

    def __call__(self, step: int) -> float:
        return self.initial_learning_rate / (1 + self.decay_rate * self._progress(step))


@dataclass(frozen=True)
class PiecewiseConstantDecay(LearningRateSchedule):
    """One rate up to and including the first boundary, another up to the second, and so on.

    Parameters
    ----------
    boundaries : sequence of int
        Numbers of steps, in increasing order.
    values : sequence of float
        The rates: one more than boundaries.
    name : str

    Examples
    --------
    >>> rate = PiecewiseConstantDecay([100, 200], [0.1, 0.01, 0.001])
    >>> rate(100), rate(101), rate(500)
    (0.1, 0.01, 0.001)
    """

    boundaries: Sequence[int]
    values: Sequence[float]
    name: str = "PiecewiseConstantDecay"

    def __post_init__(self) -> None:
        if len(self.values) != len(self.boundaries) + 1:
            raise ValueError(
                f"values must be one more than boundaries, not {len(self.values)} for {len(self.boundaries)}"
            )
        require(
            not any((a >= b for a, b in itertools.pairwise(self.boundaries))),
            "boundaries must increase",
            list(self.boundaries),
        )

    def __call__(self, step: int) -> float:
        return self.values[bisect_left(self.boundaries, step)]


@dataclass(frozen=True)
class PolynomialDecay(_OverSteps):
    """``(initial_learning_rate - end_learning_rate) * (1 - step / decay_steps) ** power + end_learning_rate``.

    Parameters
    ----------
    initial_learning_rate, decay_steps, end_learning_rate, power : float
        After ``decay_steps`` the rate stays ``end_learning_rate``.
    cycle : bool
        Stretch ``decay_steps`` to its next multiple that is not below the step, so that the rate rises again.
    name : str

    Examples
    --------
    >>> PolynomialDecay(1.0, decay_steps=10, end_learning_rate=0.5)(5)
    0.75
    """

    initial_learning_rate: float
    decay_steps: float
    end_learning_rate: float = 0.0001
    power: float = 1.0
    cycle: bool = False
    name: str = "PolynomialDecay"

    def __call__(self, step: int) -> float:
        steps = self.decay_steps
        if self.cycle:
            steps *= max(1, math.ceil(step / steps))
        left = 1 - min(step, steps) / steps
        difference = self.initial_learning_rate - self.end_learning_rate
        return difference * left**self.power + self.end_learning_rate


@dataclass(frozen=True)
class CosineDecay(_OverSteps):
    """Half a cosine wave, after an optional linear warm-up (Loshchilov and Hutter 2016).

    The rate falls to ``alpha`` times its highest value in ``decay_steps`` steps, and stays there. With
    ``warmup_target``, it first rises from ``initial_learning_rate`` to the target in ``warmup_steps`` steps.

    Parameters
    ----------
    initial_learning_rate, decay_steps, alpha : float
    name : str
    warmup_target : float, optional
    warmup_steps : int

    Examples
    --------
    >>> rate = CosineDecay(0.0, decay_steps=100, warmup_target=0.5, warmup_steps=10)
    >>> rate(5), rate(10), rate(60), rate(110)
    (0.25, 0.5, 0.25, 0.0)
    """

    initial_learning_rate: float
    decay_steps: float
    alpha: float = 0.0
    name: str = "CosineDecay"
    warmup_target: float | None = None
    warmup_steps: int = 0

    def __call__(self, step: int) -> float:
        if self.warmup_target is None:
            return self.initial_learning_rate * self._share(step)
        if step < self.warmup_steps:
            rise = self.warmup_target - self.initial_learning_rate
            return rise * (step / self.warmup_steps) + self.initial_learning_rate
        return self.warmup_target * self._share(step - self.warmup_steps)

    def _share(self, step: int) -> float:
        return (1 - self.alpha) * _cosine(min(step, self.decay_steps) / self.decay_steps) + self.alpha


@dataclass(frozen=True)
class CosineDecayRestarts(LearningRateSchedule):
    """Half cosine waves, one after the other (Loshchilov and Hutter 2016: warm restarts).

    Parameters
    ----------
    initial_learning_rate, first_decay_steps : float
    t_mul : float
        Each wave is so many times longer than the one before: at least 1.
    m_mul : float
        The highest rate of each wave, as a multiple of the one before.
    alpha : float
        The lowest rate, as a multiple of the initial one.
    name : str

    Examples
    --------
    >>> rate = CosineDecayRestarts(0.5, first_decay_steps=10, m_mul=0.5)
    >>> rate(0), rate(5), rate(10), rate(20), rate(30)
    (0.5, 0.25, 0.25, 0.125, 0.125)
    """

    initial_learning_rate: float
    first_decay_steps: float
    t_mul: float = 2.0
    m_mul: float = 1.0
    alpha: float = 0.0
    name: str = "CosineDecayRestarts"

    def __post_init__(self) -> None:
        require(self.first_decay_steps > 0, "first_decay_steps must be positive", self.first_decay_steps)
        require(self.t_mul >= 1, "t_mul must be at least 1", self.t_mul)

    def __call__(self, step: int) -> float:
        start, length, restarts = 0.0, float(self.first_decay_steps), 0
        # Equal waves: counted by a division, since a long training would have many of them.
        if self.t_mul == 1:
            restarts = int(step // length)
            start = restarts * length
        while step >= start + length:  # a logarithm would miss restarts by rounding
            start, length, restarts = start + length, length * self.t_mul, restarts + 1
        wave = self.m_mul**restarts * _cosine((step - start) / length)
        return self.initial_learning_rate * ((1 - self.alpha) * wave + self.alpha)


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))
