"""The base class of metrics."""

from __future__ import annotations

import functools
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrat import context, representation
from mpistrat.arrays import arrays
from mpistrat.process import mpi
from mpistrat.runtime.agreement.operation import call_site
from mpistrat.runtime.agreement.whole_call import whole
from mpistrat.strategy import Variable, get_strategy, has_strategy
from mpistrat.training.metrics.total import ExactTotal, Total, summed_when_read


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
        By default that of the class in small letters, such as ``"mean_squared_error"``.

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

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "result" in cls.__dict__:  # it may read several variables
            as_one_call = whole(lambda metric: get_strategy().extended.engine.topology)
            cls.result = as_one_call(cls.result)  # type: ignore[method-assign]
        if "update_state" in cls.__dict__:
            cls.update_state = _counted(cls.__dict__["update_state"])  # type: ignore[attr-defined]

    def __init__(self, name: str | None = None):
        if name is None:  # that of the class of this package: a subclass of a program has its name, as before
            kinds = (each for each in type(self).__mro__ if each.__module__.partition(".")[0] == "mpistrat")
            kind = next((each for each in kinds if each is not Metric), type(self))
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
        return {each.name.removeprefix(f"{self._name}/"): each for each in self._variables}

    def add_weight(self, name: str, shape: tuple[int, ...] = ()) -> Variable:
        """Create a float64 variable that starts at zero and is summed over the replicas when read."""
        made = summed_when_read(f"{self._name}/{name}", np.zeros(shape))
        self._variables.append(made)
        return made

    def add_total(self, name: str) -> Total:
        """Create a float64 sum over all replicas. It is exact if the strategy's ``implementation`` is."""
        exact = get_strategy().extended.engine.options.algorithm == "exact"
        made = (ExactTotal if exact else Total)(f"{self._name}/{name}")
        self._variables.append(made.variable)
        return made

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
        """Return an HTML table. Never communicates: the result is in that of one replica only."""
        facts = {"name": self._name, "variables": [each.name for each in self._variables]}
        if all(each.distribute_strategy.num_replicas_in_sync == 1 for each in self._variables):
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
