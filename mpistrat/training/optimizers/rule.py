"""How an optimizer changes arrays, what options add to that, and what a program gives it as gradients."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import sys
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

import numpy as np

from mpistrat.arrays import arrays
from mpistrat.arrays.device import cupy_for
from mpistrat.arrays.gpu import kernels
from mpistrat.arrays.gpu.kernels import EachElement
from mpistrat.process.own_files import level_of_program
from mpistrat.representation import require
from mpistrat.values import IndexedSlices, component
from mpistrat.variables import Variable

ELEMENTS = 1 << 16
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


class RuleAround(ABC):
    """A rule that does more than another one, before and after it."""

    def __init__(self, rule: Rule):
        self._rule = rule

    @abstractmethod
    def _do(
        self, update: Update, weights: np.ndarray, gradient: Any, step: int, rate: float, state: Sequence[np.ndarray]
    ) -> None:
        """Call ``update`` of the other rule, and do the rest."""

    def update(self, weights: np.ndarray, gradient: np.ndarray, step: int, rate: float, *state: np.ndarray) -> None:
        self._do(self._rule.update, weights, gradient, step, rate, state)

    def update_consuming(
        self, weights: np.ndarray, gradient: np.ndarray, step: int, rate: float, *state: np.ndarray
    ) -> None:
        self._do(self._rule.update_consuming, weights, gradient, step, rate, state)

    def update_rows(self, weights: np.ndarray, rows: IndexedSlices, step: int, rate: float, *state: np.ndarray) -> None:
        self._do(self._rule.update_rows, weights, rows, step, rate, state)


class WeightDecay(RuleAround):
    """A rule that shrinks the weights before another rule changes them.

    Each step subtracts ``rate * weight_decay * w``. Raise ValueError if the weight decay is negative.
    """

    def __init__(self, rule: Rule, weight_decay: float):
        require(weight_decay >= 0, "weight_decay must not be negative", weight_decay)
        super().__init__(rule)
        self._weight_decay = weight_decay

    def _do(
        self, update: Update, weights: np.ndarray, gradient: Any, step: int, rate: float, state: Sequence[np.ndarray]
    ) -> None:
        weights *= 1 - rate * self._weight_decay
        update(weights, gradient, step, rate, *state)

    def on_gpu(self, step: int, rate: float) -> tuple[EachElement, tuple[float, ...]] | None:
        found = self._rule.on_gpu(step, rate)
        if found is None:
            return None
        kernel, numbers = found
        return _with_decay(kernel), (*numbers, 1 - rate * self._weight_decay)


@functools.cache
def _with_decay(kernel: EachElement) -> EachElement:
    weights = kernel.reads[1]
    return kernel.extended("decay", scalars=["decay_kept"], before=f"{weights} *= decay_kept;")


class MovingAverage(RuleAround):
    """A rule that averages the weights after another rule has changed them.

    The average is the last slot, `AVERAGE`: ``average = momentum * average + (1 - momentum) * w``. After the first step
    it is the weights. After each ``overwrite_frequency`` steps, the weights become the average. Raise ValueError unless
    ``momentum`` is in [0, 1] and the frequency is positive.

    As in Keras, each of the ``calls`` that make a step averages, and overwrites if the step does. Between two steps the
    weights stay, so the calls before the last are one average with a power of the momentum, taken before the rule.
    """

    def __init__(self, rule: Rule, momentum: float, overwrite_frequency: int | None, calls: int):
        require(0 <= momentum <= 1, "ema_momentum must be in [0, 1]", momentum)
        if overwrite_frequency is not None and (not isinstance(overwrite_frequency, int) or overwrite_frequency < 1):
            raise ValueError(f"ema_overwrite_frequency must be an int above 0, or None, not {overwrite_frequency!r}")
        super().__init__(rule)
        self._momentum, self._frequency, self._earlier = momentum, overwrite_frequency, calls - 1

    def _kept(self, step: int) -> float:
        return self._momentum if step > 1 else 0.0

    def _kept_before(self, step: int) -> float:
        """Return the part of the average that the calls before the last keep: of one, where that overwrites."""
        return self._kept(step) ** (min(self._earlier, 1) if self._overwrites(step) else self._earlier)

    def within(self, average: np.ndarray, weights: np.ndarray, steps: int, calls: int) -> np.ndarray:
        """Return the average after some calls of a step that is not complete, the one after so many steps."""
        kept = self._momentum ** (min(calls, 1) if self._overwrites(steps + 1) else calls)
        return average * kept + weights * (1 - kept)

    def _overwrites(self, step: int) -> bool:
        return self._frequency is not None and step % self._frequency == 0

    def _do(
        self, update: Update, weights: np.ndarray, gradient: Any, step: int, rate: float, state: Sequence[np.ndarray]
    ) -> None:
        if self._earlier:
            self._average(state[-1], weights, step, self._kept_before(step))
        update(weights, gradient, step, rate, *state[:-1])
        self._average(state[-1], weights, step, self._kept(step))

    def _average(self, average: np.ndarray, weights: np.ndarray, step: int, kept: float) -> None:
        for mean, w in blocks(average, weights):
            mean *= kept
            mean += w * (1 - kept)
        if self._overwrites(step):
            weights[...] = average

    def on_gpu(self, step: int, rate: float) -> tuple[EachElement, tuple[float, ...]] | None:
        found = self._rule.on_gpu(step, rate)
        if found is None:
            return None
        kernel, numbers = found
        averaged = self._kept_before(step), self._kept(step), float(self._overwrites(step))
        return _with_average(kernel, self._earlier > 0), (*numbers, *averaged)


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
    flat = [array.reshape(-1) for array in arrays]
    return [tuple([each[at : at + ELEMENTS] for each in flat]) for at in range(0, size, ELEMENTS)]


def place_of(kind: type, name: str) -> int:
    """Return the place of the class that defines an attribute, in the order in which Python looks it up."""
    return next(place for place, each in enumerate(kind.__mro__) if name in vars(each))


if TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack  # `typing` has it from Python 3.11 on
else:
    Unpack = dict  # annotations are not evaluated


class OptimizerOptions(TypedDict, total=False):
    """The arguments that every optimizer hands on to `Optimizer`, which describes them."""

    clipnorm: float | None
    clipvalue: float | None
    global_clipnorm: float | None
    use_ema: bool
    ema_momentum: float
    ema_overwrite_frequency: int | None
    gradient_accumulation_steps: int | None
    shard_state: bool


def spell_out_options(init: Callable[..., None], of_base: Callable[..., None]) -> None:
    """Let the signature of a constructor show each of its `OptimizerOptions`, as that of the base class has it."""
    own = inspect.signature(init)
    *others, last = own.parameters.values()
    if "OptimizerOptions" in str(last.annotation):
        known = inspect.signature(of_base).parameters
        options = [known[name] for name in OptimizerOptions.__annotations__]
        init.__signature__ = own.replace(parameters=[*others, *options])  # type: ignore[attr-defined]


def is_of_package(function: Callable[..., Any]) -> bool:
    """Return whether a function or class is of this package, not of the program."""
    return function.__module__.partition(".")[0] == __name__.partition(".")[0]


def options_of(rule: Any) -> dict[str, Any]:
    """Return the numbers and texts that a rule of the program keeps by the names of its constructor's arguments."""
    kind = type(rule)
    names = () if is_of_package(kind) else inspect.signature(kind).parameters
    kept = {name: vars(rule).get(name) for name in names}
    return {name: each for name, each in kept.items() if isinstance(each, (bool, int, float, str, np.generic))}


def in_words(value: Any, depth: int = 3) -> str:
    """Return a learning rate as the ranks compare it: a number, or a function with the numbers and texts that it keeps.

    It keeps its defaults, what it takes from the function around it, and its attributes: those of a schedule, too.
    Objects that are neither numbers, texts nor functions may differ between ranks: they are named by their class.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (np.generic, np.ndarray)):
        return (
            repr(value.item()) if value.ndim == 0 else f"{value.dtype}{value.shape} {zlib.crc32(value.tobytes()):08x}"
        )
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(in_words(each, depth) for each in value)}]"
    kept: dict[Any, Any] = dict(value if isinstance(value, Mapping) else getattr(value, "__dict__", {}))
    if inspect.isfunction(value):
        kept |= {**inspect.getclosurevars(value).nonlocals, **(value.__kwdefaults__ or {})}
        kept |= enumerate(value.__defaults__ or ())
    elif isinstance(value, partial):
        kept |= {"of": value.func, **value.keywords}
        kept |= enumerate(value.args)
    is_open = depth > 0 and (callable(value) or isinstance(value, Mapping)) and not inspect.ismethod(value)
    shown = [f"{name}={in_words(each, depth - 1)}" for name, each in kept.items()] if is_open else []
    return f"{getattr(value, '__qualname__', type(value).__qualname__)}({', '.join(shown)})"


# --- gradients: checks, copies of what the step would change, and clipping ------


Pairs = list[tuple[Any, Variable]]
_looked_at: set[CodeType] = set()


def as_pair(each: Any) -> tuple[Any, Any]:
    """Return a gradient and its variable."""
    if not isinstance(each, (tuple, list)) or len(each) != 2:
        raise TypeError(
            f"apply_gradients takes pairs (gradient, variable), not {each!r}: write zip(gradients, variables)"
        )
    gradient, variable = each
    if isinstance(gradient, Variable) and not isinstance(variable, Variable):
        raise TypeError(
            f"apply_gradients takes pairs (gradient, variable), and got the variable {gradient.name!r} first: write "
            "zip(gradients, variables), in this order"
        )
    return gradient, variable


def checked(
    variables: Sequence[Variable], gradients: Sequence[Any], replica: int, replicas: int, step: int, aggregate: bool
) -> None:
    """Raise FloatingPointError if a gradient has NaN. Warn if it may be a mean, and is to be added to others."""
    if aggregate and replicas > 1:
        _warn_of_means(replicas)
    for variable, gradient in zip(variables, gradients, strict=True):
        if np.isnan(arrays.to_host(_values(gradient))).any():
            raise FloatingPointError(
                f"replica {replica}, step {step}: the gradient of variable {variable.name!r} has NaN, as would "
                "the sum. Look at the batch of this replica, and for divisions by zero, logarithms and roots"
            )


def _warn_of_means(replicas: int) -> None:
    """Warn if the function of the program that applies gradients, or one that it calls, takes a mean."""
    level = level_of_program()
    frame = sys._getframe(level - 1)
    code = frame.f_code
    if code in _looked_at:
        return
    _looked_at.add(code)
    known = {**frame.f_globals, **frame.f_locals}
    called = (known.get(name) for name in (*code.co_names, *code.co_freevars))
    if any("mean" in each.co_names for each in (code, *(f.__code__ for f in called if isinstance(f, FunctionType)))):
        warnings.warn(
            f"apply_gradients adds up the gradients of {replicas} replicas, and this function takes a mean. The mean "
            f"over the rows of one replica makes the step about {replicas} times too large: divide sums by the number "
            "of rows of the whole batch",
            RuntimeWarning,
            stacklevel=level,
        )


def names_of(pairs: Pairs) -> tuple[str, ...]:
    """Return the names of the variables with and without gradients, for the ranks to compare."""
    return tuple(
        [
            f"no gradient of {getattr(variable, 'name', '')}" if gradient is None else variable.name
            for gradient, variable in pairs
        ]
    )


def fitting(gradient: Any, variable: Variable) -> Any:
    """Return a gradient that fits its variable.

    Raise ValueError if the shape differs, the dtype cannot be cast, or an index is out of range. Raise TypeError if the
    dtype of rows cannot be cast.
    """
    gradient = component(gradient)
    if isinstance(gradient, IndexedSlices):
        variable.check_rows(gradient)
        return gradient
    variable = variable.part
    array = arrays.numpy_or_cupy(gradient)
    if array.shape != variable.shape:
        raise ValueError(
            f"variable {variable.name!r} has shape {variable.shape}, and its gradient {array.shape}: sum over the "
            "rows of the batch, or gradient.reshape(variable.shape)"
        )
    if not np.can_cast(array.dtype, variable.dtype, "same_kind"):
        raise ValueError(
            f"variable {variable.name!r} has dtype {variable.dtype}, and its gradient {array.dtype}: cast it"
        )
    return gradient


def places(changed: Iterable[np.ndarray]) -> np.ndarray:
    """Return where arrays lie that a step changes, for `apart`: contiguous ones that do not overlap."""
    return np.array(sorted(_span(array) for array in changed if array.size), np.uint64).reshape(-1, 2)


def apart(gradients: Sequence[Any], spans: np.ndarray) -> list[Any]:
    """Return gradients, with copies of those that may lie in memory that a step changes.

    ``spans`` are the `places` of what it changes. A step changes its variables one after another. A gradient that is a
    view of one of them must not change before it is used.
    """
    found = []
    for gradient in gradients:
        given = component(gradient)
        rows = isinstance(given, IndexedSlices)
        values = given.values if rows else given
        if not arrays.on_gpu(values):
            array = arrays.to_host(values)
            first, end = _span(array) if array.size else (0, 0)
            before = spans[:, 0].searchsorted(np.uint64(end))  # as many begin before the gradient ends
            if before and spans[before - 1, 1] > first:
                own = array.copy()
                gradient = IndexedSlices(own, given.indices, given.dense_shape) if rows else own
        found.append(gradient)
    return found


def _span(array: np.ndarray) -> tuple[int, int]:
    """Return the address of the first byte of an array, and of the one past its last."""
    first = last = array.__array_interface__["data"][0]
    for length, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            first += (length - 1) * stride
        else:
            last += (length - 1) * stride
    return first, last + array.itemsize


BLOCK = 1 << 15  # real numbers that are squared together; another number would change the last bits of norms


class Clipping:
    """Limits of the gradients of a step. At most one is set.

    ``clipnorm`` limits the norm of each gradient, ``clipvalue`` the absolute value of each element, and
    ``global_clipnorm`` the norm of all gradients together. Raise ValueError if two are set, or one is not positive.
    """

    def __init__(self, clipnorm: float | None, clipvalue: float | None, global_clipnorm: float | None):
        given = {"clipnorm": clipnorm, "clipvalue": clipvalue, "global_clipnorm": global_clipnorm}
        self.limits = {name: limit for name, limit in given.items() if limit is not None}
        require(len(self.limits) <= 1, "only one of clipnorm, clipvalue and global_clipnorm may be set", self.limits)
        for name, limit in self.limits.items():
            require(limit > 0, f"{name} must be positive", limit)
        self._norm, self._value, self._global_norm = given.values()

    def __call__(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the clipped gradients. Those given are not changed, and are returned where no limit is exceeded.

        The result has the same bits on all replicas that give the same bits on one kind of device.
        """
        gradients = [_as_arrays(gradient) for gradient in gradients]
        squares = squared_norms([_values(each) for each in gradients]) if self.by_norm else []
        return self.clipped(gradients, self.norms(squares))

    @property
    def by_norm(self) -> bool:
        """Whether a norm is limited."""
        return self._value is None

    def norms(self, squares: Sequence[float]) -> list[float]:
        """Return the norm that is limited for each gradient of a step, from its `squared_norms`."""
        if self._global_norm is not None:
            squares = [math.fsum(squares)] * len(squares)
        return [*map(math.sqrt, squares)]

    def clipped(self, gradients: Sequence[Any], norms: Sequence[float]) -> list[Any]:
        """Return gradients, or parts of them, with their limit. ``norms`` has that of each; none without `by_norm`."""
        limit = self._value or self._norm or self._global_norm
        assert limit is not None
        if self._value is not None:
            return [_changed(gradient, lambda values: _within(values, limit)) for gradient in gradients]
        return [
            gradient if norm <= limit else _scaled(gradient, limit / norm)
            for gradient, norm in zip(gradients, norms, strict=True)
        ]


def squared_norms(values: Sequence[Any]) -> list[float]:
    """Return the sum of the squared absolute values of each array, computed in float64.

    The order of the additions depends on the sizes alone, so that ranks with other processors get the same bits. BLAS
    does not promise that.
    """
    values = [each.reshape(-1).view(each.real.dtype) if each.dtype.kind == "c" else each for each in values]
    norms = [0.0] * len(values)
    on_gpu: dict[np.dtype, list[int]] = {}
    for i, each in enumerate(values):
        if arrays.on_gpu(each) and each.dtype.name in kernels.FLOATS:
            on_gpu.setdefault(each.dtype, []).append(i)
        else:
            norms[i] = added(squares_of_blocks(np.ascontiguousarray(arrays.to_host(each)).reshape(-1)))
    for members in on_gpu.values():
        given = [cupy_for("a norm").ascontiguousarray(values[i]) for i in members]
        for i, norm in zip(members, kernels.squared_norms(given), strict=True):
            norms[i] = norm
    return norms


def squares_of_blocks(flat: np.ndarray) -> Iterator[float]:
    """Yield the sum of the squares of each `BLOCK` of a flat array of real numbers on the host."""
    for start in range(0, flat.size, BLOCK):
        wide = flat[start : start + BLOCK].astype(np.float64)
        np.multiply(wide, wide, out=wide)
        yield float(np.add.reduce(wide))


def added(numbers: Iterable[float]) -> float:
    """Return the sum in this order. Since Python 3.12 the built-in function has other bits."""
    return functools.reduce(operator.add, numbers, 0.0)


def _as_arrays(gradient: Any) -> Any:
    """Return a gradient as an array, or as rows with different indices."""
    if not isinstance(gradient, IndexedSlices):
        return arrays.numpy_or_cupy(gradient)
    indices, where = np.unique(arrays.to_host(gradient.indices), return_inverse=True)
    rows = np.zeros((len(indices), *gradient.values.shape[1:]), gradient.values.dtype)
    np.add.at(rows, where, arrays.to_host(gradient.values))
    return IndexedSlices(arrays.from_host(rows, gradient.values), indices, gradient.dense_shape)


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, IndexedSlices) else gradient


def _changed(gradient: Any, change: Callable[[Any], Any]) -> Any:
    """Return a gradient whose values are changed by a function of NumPy or CuPy arrays."""
    if isinstance(gradient, IndexedSlices):
        return IndexedSlices(_changed(gradient.values, change), gradient.indices, gradient.dense_shape)
    if arrays.on_gpu(gradient) and gradient.dtype.kind not in "fc":  # bfloat16 is bits there
        return arrays.from_host(change(arrays.to_host(gradient)), gradient)
    return change(gradient)


def _scaled(gradient: Any, factor: float) -> Any:
    return _changed(gradient, lambda values: (values * factor).astype(values.dtype, copy=False))


def _within(values: Any, limit: float) -> Any:
    if values.dtype.kind == "c":
        raise ValueError(f"clipvalue cannot clip a gradient of {values.dtype}: use clipnorm")
    return values.clip(-limit, limit).astype(values.dtype, copy=False)
