"""What a program sets for its thread, and what must hold in the threads of its replicas too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

# NumPy 2 keeps its treatment of floating point errors in a context variable, which a thread gets with the context.
_ERRSTATE_OF_THREAD = int(np.__version__.split(".")[0]) < 2


def of_caller() -> tuple[Any, ...] | None:
    """Return the settings of this thread that its context variables do not have; None without any."""
    torch: Any = sys.modules.get("torch")
    jax: Any = sys.modules.get("jax")
    if torch is None and jax is None and not _ERRSTATE_OF_THREAD:
        return None
    errors: Any = np.geterr() if _ERRSTATE_OF_THREAD else {}
    of_torch = None
    if hasattr(torch, "is_grad_enabled"):  # there, and wholly imported
        autocast = (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        )
        of_torch = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast
    of_jax = {name: getattr(jax.config, name) for name in _managers()} if hasattr(jax, "config") else {}
    return errors, of_torch, of_jax


@lru_cache(maxsize=1)
def _managers() -> dict[str, Any]:
    """Return the public context managers of JAX that set a value of its configuration in a thread, by its name."""
    jax: Any = sys.modules["jax"]
    there = vars(jax)
    return {name: there[name[4:]] for name in jax.config.values if callable(there.get(name[4:]))}


@contextmanager
def holding(settings: tuple[Any, ...]) -> Iterator[None]:
    """Context in which the settings of another thread hold in this one."""
    errors, of_torch, of_jax = settings
    with ExitStack() as stack:
        stack.enter_context(np.errstate(**errors))
        if of_torch is not None:
            torch: Any = sys.modules["torch"]
            grad, inference, (enabled, dtype, caches) = of_torch
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(torch.autocast("cpu", dtype, enabled, caches))
        for name, value in of_jax.items():
            if getattr(sys.modules["jax"].config, name) != value:
                stack.enter_context(_managers()[name](value))
        yield
