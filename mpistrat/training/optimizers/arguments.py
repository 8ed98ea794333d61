"""The arguments that each optimizer hands on to the base class."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict

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
