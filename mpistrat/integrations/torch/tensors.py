"""Tensors of a call: their checks before any communication, NumPy arrays of them, and results written back."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import torch

from mpistrat.arrays import arrays
from mpistrat.runtime.agreement.whole_call import whole

# Decorates the collectives of a process group. Its ``open_topology`` raises if the group was destroyed.
collective = whole(attrgetter("open_topology"))

# NumPy has no such dtype, and none is needed to move the bytes.
BYTES_ONLY = frozenset(
    dtype for name in dir(torch) if name.startswith("float8") and isinstance(dtype := getattr(torch, name), torch.dtype)
)


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
    require(len(tensors) == size, f"{name}: the list must have one {kind} for each of {size} ranks, not {len(tensors)}")


def require_dense(tensor: torch.Tensor) -> None:
    """Raise a TypeError if a tensor is sparse, quantized or nested, or does not have values."""
    if tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta):
        return
    if tensor.is_nested:
        text = "a nested one: call its to_padded_tensor()"
    elif tensor.is_quantized:
        text = f"one of the quantized dtype {tensor.dtype}: call its dequantize()"
    elif tensor.is_meta:
        text = "one on the device meta, where tensors do not have values: call to_empty() of its module"
    else:
        text = f"one of layout {tensor.layout}: call its to_dense() (for embeddings: sparse=False)"
    raise TypeError(f"process groups of mpistrat take dense tensors, not {text}")


def host_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as a contiguous array of the host, on the same memory where possible.

    Raise TypeError as `require_dense`.
    """
    require_dense(tensor)
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype in BYTES_ONLY:
        tensor = tensor.view(torch.uint8)
    return arrays.to_host(tensor)


def host_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return the bytes of `host_array`, flat."""
    return arrays.as_bytes(host_array(tensor))


def is_in_place(tensor: torch.Tensor) -> bool:
    """Return whether `host_array` shares the tensor's memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def write(tensor: torch.Tensor, result: np.ndarray | torch.Tensor) -> None:
    """Copy a result into a tensor of as many elements, of any strides and on any device."""
    if isinstance(result, torch.Tensor):
        tensor.detach().copy_(result.reshape(tensor.shape))
        return
    if is_in_place(tensor):
        if tensor.data_ptr() != result.ctypes.data:
            target = host_array(tensor)
            np.copyto(target, result.reshape(target.shape), casting="unsafe")  # bools come as integers
        return
    values = torch.from_numpy(np.ascontiguousarray(result).reshape(-1).view(np.uint8))
    tensor.detach().copy_(values.view(tensor.dtype).reshape(tensor.shape))


def write_each(tensors: Sequence[torch.Tensor], results: Sequence[np.ndarray | torch.Tensor]) -> None:
    """Write each result into its tensor."""
    for tensor, result in zip(tensors, results, strict=True):
        write(tensor, result)


def room(tensor: torch.Tensor) -> np.ndarray:
    """Return memory for the bytes of a tensor: its own, if it is contiguous on the host."""
    return host_bytes(tensor) if is_in_place(tensor) else np.empty(tensor.nbytes, np.uint8)


def write_bytes(tensors: Sequence[torch.Tensor], rooms: Sequence[np.ndarray | None]) -> None:
    """Copy what came to memory of `room` into the tensors that do not share it."""
    for tensor, data in zip(tensors, rooms, strict=False):
        if data is not None and not is_in_place(tensor):
            write(tensor, data)
