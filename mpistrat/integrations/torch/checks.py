"""Checks of the arguments of collectives, before any communication."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def require(condition: bool, text: str) -> None:
    """Raise a ValueError if a condition does not hold."""
    if not condition:
        raise ValueError(text)


def require_rank(name: str, rank: int, size: int) -> None:
    """Raise a ValueError if a group of ``size`` ranks does not have a rank."""
    require(0 <= rank < size, f"{name}: rank {rank} is not in the group, whose ranks are 0 to {size - 1}")


def require_dtype(name: str, *tensors: torch.Tensor) -> None:
    """Raise a TypeError if tensors differ in their dtype."""
    dtypes = sorted({str(tensor.dtype) for tensor in tensors})
    if len(dtypes) > 1:
        raise TypeError(f"{name}: the tensors of a call must have one dtype, not {' and '.join(dtypes)}")


def require_one_for_each_rank(name: str, kind: str, tensors: Sequence[torch.Tensor], size: int) -> None:
    """Raise a ValueError if a list does not have one tensor for each of ``size`` ranks."""
    require(
        len(tensors) == size,
        f"{name}: the list must have one {kind} for each of {size} ranks, not {len(tensors)}",
    )
