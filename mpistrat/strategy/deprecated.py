"""Former names of methods of `Strategy`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpistrat.data import Dataset, InputContext, InputOptions


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
