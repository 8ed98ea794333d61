"""Modules that only some formats need."""

from __future__ import annotations

import importlib
from typing import Any


def needed(module: str, what: str) -> Any:
    """Return a module that not all formats need.

    Raises
    ------
    ImportError
        If it is not installed. The message says how to install it.

    Examples
    --------
    >>> needed("math", "numbers").pi > 3
    True
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        top = module.partition(".")[0]
        raise ImportError(
            f"{what} need the package {top}, which cannot be imported ({error}); fix: pip install {top}"
        ) from None
