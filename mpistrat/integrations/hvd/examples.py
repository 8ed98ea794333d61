"""The examples in docstrings of this package, all of which begin alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def example(call: str, result: str = "") -> Callable[[_Function], _Function]:
    """Return a decorator that ends the docstring of a function with an example: a call, and what it prints.

    The imports that the call needs, and `init`, come before it.
    """
    lines = ["import numpy as np"] if "np." in call else []
    of_torch = ["import torch", "import mpistrat.integrations.hvd.torch as hvd"]
    lines += of_torch if "torch." in call else ["import mpistrat.integrations.hvd as hvd"]
    shown = "\n".join(f">>> {line}" for line in [*lines, "hvd.init()", call])

    def add(function: _Function) -> _Function:
        text = inspect.cleandoc(function.__doc__ or "")
        function.__doc__ = f"{text}\n\nExamples\n--------\n{shown}\n{result}\n"
        return function

    return add
