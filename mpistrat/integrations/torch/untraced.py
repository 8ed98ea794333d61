"""The backend under ``torch.compile``: what torch calls is run, not traced."""

from __future__ import annotations

import inspect

import torch

_untraced: set[type] = set()


def leave_untraced(*kinds: type) -> None:
    """Keep the methods of classes from being traced. Further calls for a class do nothing.

    The tracer also sees methods that the C++ part of torch calls while compiled code runs, such as the broadcasts of
    `DistributedDataParallel`. It refuses attributes of a process group.
    """
    for kind in kinds:
        if kind in _untraced:
            continue
        _untraced.add(kind)
        for name, method in list(vars(kind).items()):
            # Private methods are called by others only, and what these call is not traced either.
            if inspect.isfunction(method) and not method.__name__.startswith("_"):
                setattr(kind, name, torch.compiler.disable(method))
