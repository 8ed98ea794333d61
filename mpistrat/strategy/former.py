"""Parts of the interface for older programs: options of `run`, several steps in one call, former names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from mpistrat import context

if TYPE_CHECKING:
    from mpistrat.data import Dataset, InputContext, InputOptions


class RunOptions(NamedTuple):
    """Options of `Strategy.run`, without effect: kept for code written for ``tf.distribute``.

    Examples
    --------
    >>> RunOptions().experimental_enable_dynamic_batch_size
    True
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None


class MultiStepContext:
    """The outputs that the function of each step keeps for the caller.

    Attributes
    ----------
    last_step_outputs : dict
        The outputs of the last step by name. Before the first step, ``initial_loop_values``.
    non_tensor_outputs : dict
        By name, other objects that a step has set.
    """

    def __init__(self, initial: Mapping[str, Any] | None):
        self.last_step_outputs: dict[str, Any] = dict(initial or {})
        self.non_tensor_outputs: dict[str, Any] = {}

    def set_last_step_output(self, name: str, output: Any, reduce_op: Any = None) -> None:
        """Keep an output of this step, reduced over the replicas if ``reduce_op`` is given.

        Collective if it is. Called in a replica context, the value of each replica counts.
        """
        if reduce_op is not None:
            replica = context.current().replica_context
            if replica is not None:
                output = replica.all_reduce(reduce_op, output)
            else:
                output = context.current().strategy.reduce(reduce_op, output, axis=None)
        self.last_step_outputs[name] = output

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Keep another object of this step."""
        self.non_tensor_outputs[name] = output


def warn(old: str, new: str) -> None:
    """Emit a DeprecationWarning that names the replacement of a former name."""
    warnings.warn(f"{old} is deprecated: use {new}", DeprecationWarning, stacklevel=3)


class FormerNames:
    """Methods of earlier releases of ``tf.distribute``. Each warns and names its replacement."""

    def experimental_run_v2(
        self, fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function once per replica. Former name of `run`."""
        warn("experimental_run_v2", "run")
        return self.run(fn, args, kwargs)  # type: ignore[attr-defined]  # of the strategy

    def unwrap(self, value: Any) -> tuple[Any, ...]:
        """Return the components in this process. Former name of `experimental_local_results`."""
        warn("unwrap", "experimental_local_results")
        return self.experimental_local_results(value)  # type: ignore[attr-defined]  # of the strategy

    def colocate_vars_with(self, colocate_with_variable: Any) -> Any:
        """Return ``extended.colocate_vars_with``'s context. Former place of that method."""
        warn("Strategy.colocate_vars_with", "extended.colocate_vars_with")
        return self.extended.colocate_vars_with(colocate_with_variable)  # type: ignore[attr-defined]  # of the strategy

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Dataset], options: InputOptions | None = None
    ) -> Any:
        """Return the datasets of a function. Former name of `distribute_datasets_from_function`."""
        warn("experimental_distribute_datasets_from_function", "distribute_datasets_from_function")
        return self.distribute_datasets_from_function(dataset_fn, options)  # type: ignore[attr-defined]  # of the strategy
