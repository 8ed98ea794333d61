"""The base class of metrics, and their sums: in float64, or exact in fixed point if the sums of the strategy are."""

from __future__ import annotations

import functools
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import absent, context, representation
from mpistrat.arrays import arrays
from mpistrat.process import mpi
from mpistrat.runtime.agreement.collective_lock import collective_call
from mpistrat.runtime.agreement.operation import call_site
from mpistrat.strategy import Variable, get_strategy, has_strategy
from mpistrat.values import VariableAggregation, VariableSynchronization
from mpistrat.variables import read_together


def summed_when_read(name: str, value: np.ndarray) -> Variable:
    """Create a variable on the host whose copies are summed over the replicas when it is read."""
    with get_strategy().extended.engine.variables_on_host():
        return Variable(
            value, name=name, synchronization=VariableSynchronization.ON_READ, aggregation=VariableAggregation.SUM
        )


class Total:
    """A float64 sum over the values of all replicas, in a variable of this name that is summed when read."""

    def __init__(self, name: str):
        self.variable = summed_when_read(name, np.zeros((), np.float64))

    def add(self, values: np.ndarray) -> None:
        """Add float64 values of any shape to the sum of this replica."""
        self.variable.assign_add(np.asarray(np.add.reduce(values, None)))

    def result(self) -> Any:
        """Return the sum as a float64. Collective in cross-replica context, where it is over all replicas."""
        return results(self)[0]

    def of(self, value: np.ndarray) -> Any:
        """Return the sum, given the ``value`` of the variable."""
        return value[()]


def results(*totals: Total) -> list[Any]:
    """Return several sums as `Total.result` does, in one message."""
    values = read_together([total.variable for total in totals])
    return [total.of(value) for total, value in zip(totals, values, strict=True)]


_DIGIT = 20  # bits per digit
# A loaded sum is divided by the number of replicas, and the remainder is dropped: it is lost below the digits.
_GUARD = 20
_LOWEST = -1126  # exponent of the lowest bit of the first digit: a float64 scaled to 53 bits has no lower bit
_DIGITS = 112  # enough for 2 ** 60 times the largest float64
_CALL = 1 << 26  # values that fit before a carry


class ExactTotal(Total):
    """An exact sum: its bits do not depend on batches, order or the number of replicas.

    It is a superaccumulator: a fixed-point number whose digits cover all bits of a float64 (Neal, "Fast exact
    summation using small and large superaccumulators", 2015, arXiv:1505.05571). It is rounded when read.

    `exact_sum` needs the exponents of all values before it begins, but batches come one by one. This class is not
    used there because it takes 115 integers for each number in the result.
    """

    def __init__(self, name: str):
        self.variable = summed_when_read(name, np.zeros(_DIGITS + 3, np.int64))

    def add(self, values: np.ndarray) -> None:
        """Add float64 values of any shape to the sum of this replica."""
        before = self.variable.own_copy()
        words = before.copy()
        flat = values.reshape(-1)
        for start in range(0, len(flat), _CALL):
            words += _digits_of(flat[start : start + _CALL]) << _GUARD
            _carry(words[:_DIGITS], _GUARD)
        self.variable.assign_add(words - before)

    def of(self, words: np.ndarray) -> Any:
        digits = ((words + (1 << (_GUARD - 1))) >> _GUARD).tolist()
        above, below, undefined = digits[_DIGITS:]
        # inf - inf is NaN, as in float64.
        if undefined or (above and below):
            return np.float64(np.nan)
        if above or below:
            return np.float64(np.inf if above else -np.inf)
        # Integers of Python, of any size: the sum is exact.
        total = sum(digit << (_DIGIT * i) for i, digit in enumerate(digits[:_DIGITS]))
        try:
            return np.float64(total / (1 << -_LOWEST))  # Python rounds a quotient of integers only once
        except OverflowError:
            return np.float64(np.inf if total > 0 else -np.inf)


def _digits_of(values: np.ndarray) -> np.ndarray:
    """Return the sum of values as digits, then the counts of inf, -inf and NaN."""
    out = np.zeros(_DIGITS + 3, np.int64)
    out[_DIGITS:] = (values == np.inf).sum(), (values == -np.inf).sum(), np.isnan(values).sum()
    mantissa, exponent = np.frexp(np.where(np.isfinite(values), values, 0.0))
    integers = np.ldexp(mantissa, 53).astype(np.int64)
    first, shift = np.divmod(exponent - (53 + _LOWEST), _DIGIT)
    # Split at 40 bits, since 53 bits and a shift of 19 do not fit into 63.
    low = (integers & ((1 << 40) - 1)) << shift
    high = (integers >> 40) << shift
    # add.at, not +=, which would count a digit once where several values have it.
    np.add.at(out, first, low & ((1 << _DIGIT) - 1))
    np.add.at(out, first + 1, (low >> _DIGIT) & ((1 << _DIGIT) - 1))
    np.add.at(out, first + 2, (low >> 2 * _DIGIT) + high)
    for _ in range(3):
        _carry(out[:_DIGITS], 0)
    return out


def _carry(words: np.ndarray, guard: int) -> None:
    """Add the overflow of each digit to the next digit, which may then overflow a little itself."""
    over = words[:-1] >> (_DIGIT + guard)
    words[:-1] -= over << (_DIGIT + guard)
    words[1:] += over << guard


def _counted(update_state: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``update_state``: it refuses a metric that would count this rank's values only."""

    @functools.wraps(update_state)
    def call(self: Metric, *args: Any, **kwargs: Any) -> Any:
        if not self._in_scope and has_strategy() and context.current().replica_context is not None:
            raise ValueError(
                f"the metric {self.name!r} was created outside of the strategy's scope, and would count the values of "
                "this rank only: create it in `with strategy.scope():`"
            )
        return update_state(self, *args, **kwargs)

    return call


def _remembered(init: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``__init__``: `Metric.get_config` returns the arguments of the object's own class."""
    explained = absent.explain_arguments(init, absent.OF_METRIC_ARGUMENTS)

    @functools.wraps(init)
    def __init__(self: Metric, *args: Any, **kwargs: Any) -> None:
        vars(self).setdefault("_arguments", (args, kwargs))
        explained(self, *args, **kwargs)

    return __init__


def _warn_of_one_rank(name: str) -> None:
    if mpi.running() and mpi.among_several() and mpi.start().COMM_WORLD.rank == 0:
        warnings.warn(
            f"the metric {name!r}, created{call_site()} outside of every scope, counts the values of one rank: "
            'create it in `with strategy.scope():`, or in that of OneDeviceStrategy("cpu:0") if one rank is meant',
            RuntimeWarning,
            stacklevel=3,
        )


class Metric(ABC):
    """The base class of metrics.

    Create a metric in the scope of a strategy. ``update_state`` in a replica context changes only the copies of
    this replica. ``result`` in cross-replica context sums the copies over the replicas, which is collective.

    Parameters
    ----------
    name : str, optional
        By default the name of the class in small letters, such as ``"mean_squared_error"``.

    Warns
    -----
    RuntimeWarning
        If a metric is created outside of every scope in a job of several ranks.

    Raises
    ------
    ValueError
        By ``update_state`` in ``strategy.run``, if the metric was created outside of every scope.

    Examples
    --------
    >>> import numpy as np
    >>> class Count(Metric):
    ...     def __init__(self, name="count"):
    ...         super().__init__(name)
    ...         self._count = self.add_total("count")
    ...
    ...     def update_state(self, values):
    ...         self._count.add(np.ones(len(values)))
    ...
    ...     def result(self):
    ...         return self._count.result()
    >>> count = Count()
    >>> count.update_state([1, 2])
    >>> count.update_state([3])
    >>> float(count.result())
    3.0
    """

    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    if not TYPE_CHECKING:  # a type checker must find wrong names itself

        def __getattr__(self, name: str) -> Any:
            return absent.of_object(self, name, absent.OF_METRIC)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in cls.__dict__:
            cls.__init__ = _remembered(cls.__init__)  # type: ignore[method-assign]
        if "result" in cls.__dict__:  # it may read several variables
            as_one_call = collective_call(lambda metric: get_strategy().extended.engine.topology)
            cls.result = as_one_call(cls.result)  # type: ignore[method-assign]
        if "update_state" in cls.__dict__:
            cls.update_state = _counted(cls.__dict__["update_state"])  # type: ignore[attr-defined]

    @_remembered
    def __init__(self, name: str | None = None):
        if name is None:  # of the class of this package, also for a subclass of the program
            kinds = (base for base in type(self).__mro__ if base.__module__.partition(".")[0] == "mpistrat")
            kind = next((base for base in kinds if base is not Metric), type(self))
            name = re.sub("(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()
        self._name = name
        self._in_scope = has_strategy()
        if not self._in_scope:
            _warn_of_one_rank(self._name)
        self._variables: list[Variable] = []

    @property
    def name(self) -> str:
        """The name of the metric."""
        return self._name

    @property
    def variables(self) -> list[Variable]:
        """The variables that hold the counts, to be saved."""
        return list(self._variables)

    def named_variables(self, name_of: Callable[[Variable], str]) -> dict[str, Variable]:
        """Return `variables` by the names that they have below this metric in a `Checkpoint`."""
        return {variable.name.removeprefix(f"{self._name}/"): variable for variable in self._variables}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Update the state, and return the result."""
        self.update_state(*args, **kwargs)  # type: ignore[attr-defined]  # of the subclass
        return self.result()

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that make this metric again, by name."""
        import inspect  # a late import: takes 4 ms

        args, kwargs = self._arguments
        bound = inspect.signature(type(self).__init__).bind(self, *args, **kwargs)
        bound.apply_defaults()
        _, *names = bound.arguments
        return {name: bound.arguments[name] for name in names} | {"name": self._name}

    def add_weight(self, name: str, shape: tuple[int, ...] = (), initializer: str | None = "zeros") -> Variable:
        """Create a float64 variable that starts at zero and is summed over the replicas when read."""
        if initializer not in (None, "zeros"):
            raise ValueError(f"initializer must be 'zeros', since the sum over replicas begins at 0: {initializer!r}")
        variable = summed_when_read(f"{self._name}/{name}", np.zeros(shape))
        self._variables.append(variable)
        return variable

    def add_total(self, name: str) -> Total:
        """Create a float64 sum over all replicas. It is exact if the strategy's ``implementation`` is."""
        exact = get_strategy().extended.engine.options.algorithm == "exact"
        total = (ExactTotal if exact else Total)(f"{self._name}/{name}")
        self._variables.append(total.variable)
        return total

    @abstractmethod
    def result(self) -> Any:
        """Return the value of the metric since the last reset as a float64."""

    def reset_state(self) -> None:
        """Set the counts to zero. No communication."""
        for variable in self._variables:
            variable.assign(np.zeros(variable.shape, variable.dtype))

    def reset_states(self) -> None:
        """Set the counts to zero: the former name of `reset_state`."""
        self.reset_state()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r}>"

    def _repr_html_(self) -> str:
        """Return an HTML table. Never communicates: with several replicas it lacks the result."""
        facts = {"name": self._name, "variables": [variable.name for variable in self._variables]}
        if all(variable.distribute_strategy.num_replicas_in_sync == 1 for variable in self._variables):
            facts["result"] = self.result()
        return representation.table(type(self).__name__, facts)


def as_float64(values: Any) -> np.ndarray:
    """Return values as a float64 array."""
    if type(values) is np.ndarray:  # fast path: neither masked nor of another library
        return values.astype(np.float64, copy=False)
    return arrays.as_numpy(values, np.float64)


def weighted(values: Any, sample_weight: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the values and their weights as float64 arrays of one shape. None stands for weights of 1.

    Raise ValueError if an axis of the weights has neither the length of the same axis of the values nor length 1.
    """
    values, weights = as_float64(values), as_float64(1.0 if sample_weight is None else sample_weight)
    if weights.ndim < values.ndim:
        weights = weights.reshape(weights.shape + (1,) * (values.ndim - weights.ndim))
    try:
        return values, np.broadcast_to(weights, values.shape)
    except ValueError:
        raise ValueError(
            f"sample_weight of shape {np.shape(sample_weight)} does not fit values of shape {values.shape}"
        ) from None


def require_same_shape(y_true: np.ndarray, y_pred: np.ndarray) -> None:
    """Raise ValueError unless the shapes are equal."""
    if y_true.shape != y_pred.shape:
        raise ValueError(f"y_true has shape {y_true.shape}, and y_pred {y_pred.shape}")


def quotient(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Return the quotient, and 0 where the divisor is not positive."""
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)
