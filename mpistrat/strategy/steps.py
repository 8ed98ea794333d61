"""Several steps in one call, as `StrategyExtended.experimental_run_steps_on_iterator` makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mpistrat import context


class MultiStepContext:
    """What the function of each step keeps for the caller.

    Attributes
    ----------
    last_step_outputs : dict
        By name, what the last step has set. Before the first step, ``initial_loop_values``.
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


def run_steps(fn: Callable[..., Any], iterator: Any, iterations: int, initial: Any) -> MultiStepContext:
    """Call ``fn(context, batch)`` for so many batches, and return the context."""
    made = MultiStepContext(initial)
    for _ in range(iterations):
        fn(made, next(iterator))
    return made
