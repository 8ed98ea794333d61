"""The names of the parameters of an optimizer, which the ranks compare."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def names_of(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """Return the names of the parameters of an optimizer that need gradients.

    Raises
    ------
    ValueError
        If names are not unique, or miss a parameter.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is None:
        return {p: f"allreduce.noname.{i}" for i, p in enumerate(parameters) if p.requires_grad}
    pairs = list(named_parameters)
    if not all(isinstance(each, tuple) for each in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}"
        )
    named = {p: name for name, p in pairs}
    missing = [tuple(p.shape) for p in parameters if p not in named]
    if missing:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: those of shapes "
            f"{missing}"
        )
    return {p: named[p] for p in parameters if p.requires_grad}
