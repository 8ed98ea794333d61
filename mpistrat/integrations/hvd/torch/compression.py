"""The dtypes in which tensors are sent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """A way to make tensors smaller before they are sent: here, none. Subclass it for another.

    Examples
    --------
    >>> import torch
    >>> Compressor.compress(torch.ones(2))
    (tensor([1., 1.]), None)
    """

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return what is sent, and what `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the result for what came."""
        return tensor


class _Float16(Compressor):
    """Floating point tensors are sent as float16, and added in float32."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx)


class Compression:
    """The ways to make tensors smaller before they are sent.

    Attributes
    ----------
    none : type of Compressor
        Tensors are sent as they are.
    fp16 : type of Compressor
        Floating point tensors are sent as float16, and added in float32.

    Examples
    --------
    >>> import torch
    >>> sent, dtype = Compression.fp16.compress(torch.ones(2))
    >>> sent.dtype, Compression.fp16.decompress(sent, dtype).dtype
    (torch.float16, torch.float32)
    """

    none: type[Compressor] = Compressor
    fp16: type[Compressor] = _Float16
