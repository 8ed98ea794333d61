"""What a program sets for its thread, and what must hold in the threads of its replicas too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

# NumPy 2 keeps its treatment of floating point errors in a context variable, which a thread gets with the context.
_ERRSTATE_OF_THREAD = int(np.__version__.split(".")[0]) < 2


def of_caller() -> tuple[Any, ...] | None:
    """Return the settings of this thread that its context variables do not have; None without any."""
    torch: Any = sys.modules.get("torch")
    if torch is None and not _ERRSTATE_OF_THREAD:
        return None
    errors: Any = np.geterr() if _ERRSTATE_OF_THREAD else {}
    if not hasattr(torch, "is_grad_enabled"):  # not there, or half imported
        return errors, None
    autocast = (
        torch.is_autocast_cpu_enabled(),
        torch.get_autocast_cpu_dtype(),
        torch.is_autocast_cache_enabled(),
    )
    return errors, (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)


@contextmanager
def holding(settings: tuple[Any, ...]) -> Iterator[None]:
    """Context in which the settings of another thread hold in this one."""
    errors, of_torch = settings
    with ExitStack() as stack:
        stack.enter_context(np.errstate(**errors))
        if of_torch is not None:
            torch: Any = sys.modules["torch"]
            grad, inference, (enabled, dtype, caches) = of_torch
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(torch.autocast("cpu", dtype, enabled, caches))
        yield
