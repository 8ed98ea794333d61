"""The rule by which an optimizer changes arrays, with weight decay and moving averages."""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

import numpy as np

from mpistrat.arrays.gpu.kernels import EachElement
from mpistrat.representation import require
from mpistrat.values import IndexedSlices

ELEMENTS = 1 << 16  # of a block: a rule reads it several times, from a cache
Update = Callable[..., None]
AVERAGE = "average"  # the name of the slot of `MovingAverage`


class LearningRate(float):
    """The learning rate of an optimizer at one time."""

    optimizer: Any

    def assign(self, value: float | Callable[[int], float]) -> None:
        """Set the learning rate of the optimizer, as its `learning_rate`."""
        self.optimizer.learning_rate = value

    def numpy(self) -> np.float64:
        """Return the rate as a number of NumPy."""
        return np.float64(self)

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)


def after_calls(schedule: Callable[[int], float], calls: int, steps: int) -> float:
    """Return a schedule's rate of a step of several calls. It counts calls of `apply_gradients`, as Keras' does."""
    return schedule(steps * calls + calls - 1)


class Rule(Protocol):
    """The methods of `Optimizer` that say how it changes arrays."""

    def update(self, weights: np.ndarray, gradient: np.ndarray, step: int, rate: float, *state: np.ndarray) -> None: ...

    def update_consuming(
        self, weights: np.ndarray, gradient: np.ndarray, step: int, rate: float, *state: np.ndarray
    ) -> None: ...

    def update_rows(
        self, weights: np.ndarray, rows: IndexedSlices, step: int, rate: float, *state: np.ndarray
    ) -> None: ...

    def on_gpu(self, step: int, rate: float) -> tuple[EachElement, tuple[float, ...]] | None: ...


class MovingAverage:
    """An average of the weights that a rule has changed: ``average = momentum * average + (1 - momentum) * w``.

    It is in the last slot, `AVERAGE`. After the first step it is the weights. After each ``overwrite_frequency`` steps,
    the weights become the average. Raise ValueError unless ``momentum`` is in [0, 1] and the frequency is positive.

    As in Keras, each of the ``calls`` that make a step averages, and overwrites if the step does. Between two steps the
    weights stay, so the calls before the last are one average with a power of the momentum, taken before the rule.
    """

    def __init__(self, momentum: float, overwrite_frequency: int | None, calls: int):
        require(0 <= momentum <= 1, "ema_momentum must be in [0, 1]", momentum)
        if overwrite_frequency is not None and (not isinstance(overwrite_frequency, int) or overwrite_frequency < 1):
            raise ValueError(f"ema_overwrite_frequency must be an int above 0, or None, not {overwrite_frequency!r}")
        self._momentum, self._frequency, self.earlier = momentum, overwrite_frequency, calls - 1

    def kept(self, step: int) -> float:
        """Return the part of the average that stays in this step."""
        return self._momentum if step > 1 else 0.0

    def kept_before(self, step: int) -> float:
        """Return the part of the average that the calls before the last keep: of one, where that overwrites."""
        return self.kept(step) ** (min(self.earlier, 1) if self.overwrites(step) else self.earlier)

    def within(self, average: np.ndarray, weights: np.ndarray, steps: int, calls: int) -> np.ndarray:
        """Return the average after some calls of a step that is not complete, which follows ``steps`` steps."""
        share = self._momentum ** (min(calls, 1) if self.overwrites(steps + 1) else calls)
        return average * share + weights * (1 - share)

    def overwrites(self, step: int) -> bool:
        """Return whether the weights become the average after this step."""
        return self._frequency is not None and step % self._frequency == 0

    def take(self, average: np.ndarray, weights: np.ndarray, step: int, share: float) -> None:
        """Update the average, and overwrite the weights if it is time."""
        for mean, w in blocks(average, weights):
            mean *= share
            mean += w * (1 - share)
        if self.overwrites(step):
            weights[...] = average


class RuleWithOptions:
    """A rule with weight decay before it and a moving average after it, or one of them.

    The decay subtracts ``rate * weight_decay * w`` in each step. Raise ValueError if it is negative.
    """

    def __init__(self, rule: Rule, weight_decay: float | None, average: MovingAverage | None):
        require(weight_decay is None or weight_decay >= 0, "weight_decay must not be negative", weight_decay)
        self._rule, self._decay, self._average = rule, weight_decay, average

    def _do(
        self, update: Update, weights: np.ndarray, gradient: Any, step: int, rate: float, state: Sequence[np.ndarray]
    ) -> None:
        average = self._average
        if average is not None and average.earlier:
            # The weights have not changed since the last step: one power of the momentum stands for the calls before.
            average.take(state[-1], weights, step, average.kept_before(step))
        if self._decay is not None:
            weights *= 1 - rate * self._decay
        update(weights, gradient, step, rate, *(state if average is None else state[:-1]))
        if average is not None:
            average.take(state[-1], weights, step, average.kept(step))

    def update(self, weights: np.ndarray, gradient: np.ndarray, step: int, rate: float, *state: np.ndarray) -> None:
        self._do(self._rule.update, weights, gradient, step, rate, state)

    def update_consuming(
        self, weights: np.ndarray, gradient: np.ndarray, step: int, rate: float, *state: np.ndarray
    ) -> None:
        self._do(self._rule.update_consuming, weights, gradient, step, rate, state)

    def update_rows(self, weights: np.ndarray, rows: IndexedSlices, step: int, rate: float, *state: np.ndarray) -> None:
        self._do(self._rule.update_rows, weights, rows, step, rate, state)

    def on_gpu(self, step: int, rate: float) -> tuple[EachElement, tuple[float, ...]] | None:
        kernel, average = self._rule.on_gpu(step, rate), self._average
        if kernel is not None and self._decay is not None:
            kernel = _with_decay(kernel[0]), (*kernel[1], 1 - rate * self._decay)
        if kernel is not None and average is not None:
            averaged = average.kept_before(step), average.kept(step), float(average.overwrites(step))
            kernel = _with_average(kernel[0], average.earlier > 0), (*kernel[1], *averaged)
        return kernel


@functools.cache
def _with_decay(kernel: EachElement) -> EachElement:
    weights = kernel.reads[1]
    return kernel.extended("decay", scalars=["decay_kept"], before=f"{weights} *= decay_kept;")


@functools.cache
def _with_average(kernel: EachElement, has_earlier_calls: bool) -> EachElement:
    weights = kernel.reads[1]
    averages = (
        f"average = average * {{kept}} + {weights} * ((R)1 - {{kept}}); "
        f"{weights} = average_now != (R)0 ? average : {weights};"
    )
    return kernel.extended(
        "average_of_calls" if has_earlier_calls else "average",
        state=["average"],
        scalars=["average_kept_before", "average_kept", "average_now"],
        before=averages.format(kept="average_kept_before") if has_earlier_calls else "",
        after=averages.format(kept="average_kept"),
    )


def for_update(gradient: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return a gradient in the dtype of its variable, as GPUs take it.

    A variable of 16 bits keeps a wider gradient: its own dtype has not the range of a gradient before it is scaled.
    """
    return gradient if dtype.itemsize < 4 else gradient.astype(dtype, copy=False)


def blocks(*arrays: np.ndarray) -> Iterable[tuple[np.ndarray, ...]]:
    """Return the same flat block of each of several arrays of one shape.

    The blocks are views: a write to a block changes its array. Raise ValueError if an array is not contiguous, and not
    one short vector.
    """
    size = arrays[0].size
    if size <= ELEMENTS and arrays[0].ndim == 1:
        return (arrays,) if size else ()
    for array in arrays:
        if not array.flags.c_contiguous:
            raise ValueError(f"an array of shape {array.shape} is not contiguous")
    # Views: reshape copies only an array that is not contiguous.
    flat = [array.reshape(-1) for array in arrays]
    return [tuple([array[at : at + ELEMENTS] for array in flat]) for at in range(0, size, ELEMENTS)]


def mro_position(kind: type, name: str) -> int:
    """Return the position in the MRO of the class that defines an attribute."""
    return next(position for position, base in enumerate(kind.__mro__) if name in vars(base))


if TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack  # `typing` has it from Python 3.11 on
else:
    Unpack = dict  # annotations are not evaluated


class OptimizerOptions(TypedDict, total=False):
    """The arguments that every optimizer passes to `Optimizer`, which describes them."""

    clipnorm: float | None
    clipvalue: float | None
    global_clipnorm: float | None
    use_ema: bool
    ema_momentum: float
    ema_overwrite_frequency: int | None
    gradient_accumulation_steps: int | None
    shard_state: bool


def spell_out_options(init: Callable[..., None], of_base: Callable[..., None]) -> None:
    """Let the signature of a constructor show each of its `OptimizerOptions`, as in the base class."""
    signature = inspect.signature(init)
    *others, last = signature.parameters.values()
    if "OptimizerOptions" in str(last.annotation):
        known = inspect.signature(of_base).parameters
        options = [known[name] for name in OptimizerOptions.__annotations__]
        init.__signature__ = signature.replace(parameters=[*others, *options])  # type: ignore[attr-defined]


def is_of_package(function: Callable[..., Any]) -> bool:
    """Return whether a function or class is of this package, not of the program."""
    return function.__module__.partition(".")[0] == __name__.partition(".")[0]


def options_of(rule: Any) -> dict[str, Any]:
    """Return the numbers and texts that a rule of the program keeps by the names of its constructor's arguments."""
    kind = type(rule)
    names = () if is_of_package(kind) else inspect.signature(kind).parameters
    values = {name: vars(rule).get(name) for name in names}
    return {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str, np.generic))}


def comparable_text(value: Any, depth: int = 3) -> str:
    """Return a learning rate as the ranks compare it: a number, or a function with the numbers and texts that it keeps.

    A function keeps its defaults, its closure and its attributes. So does a schedule.
    Objects that are neither numbers, texts nor functions may differ between ranks: they are named by their class.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (np.generic, np.ndarray)):
        return (
            repr(value.item()) if value.ndim == 0 else f"{value.dtype}{value.shape} {zlib.crc32(value.tobytes()):08x}"
        )
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(comparable_text(item, depth) for item in value)}]"
    parts: dict[Any, Any] = dict(value if isinstance(value, Mapping) else getattr(value, "__dict__", {}))
    if inspect.isfunction(value):
        parts |= {**inspect.getclosurevars(value).nonlocals, **(value.__kwdefaults__ or {})}
        parts |= enumerate(value.__defaults__ or ())
    elif isinstance(value, partial):
        parts |= {"of": value.func, **value.keywords}
        parts |= enumerate(value.args)
    # Bound methods and objects hold state that may differ between ranks: their class alone is compared.
    is_open = depth > 0 and (callable(value) or isinstance(value, Mapping)) and not inspect.ismethod(value)
    shown = [f"{name}={comparable_text(item, depth - 1)}" for name, item in parts.items()] if is_open else []
    return f"{getattr(value, '__qualname__', type(value).__qualname__)}({', '.join(shown)})"
