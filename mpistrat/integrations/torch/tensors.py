"""The tensors of a call: checks before any communication, NumPy arrays of them, and results written back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from mpistrat.arrays import arrays
from mpistrat.runtime.agreement.collective_lock import collective_call

# Decorates the collectives of a process group. Its ``open_topology`` raises if the group was destroyed.
collective = collective_call(attrgetter("open_topology"))

_FIELDS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}  # of torch's options, by argument


def also_of_one_tensor(options: type, position: int, *names: str) -> Callable[[Any], Any]:
    """Decorate a collective of lists: it also takes the arguments of torch's overload for one tensor.

    ``names`` are those arguments, and ``position`` is the tensor's. Arguments that are not fields of
    ``options`` become lists of one. A list under the method's own name for it may be combined with the fields, too.
    """
    kind, needed = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    signature = inspect.Signature(
        [inspect.Parameter(name, kind, default=None if name in ("op", "timeout") else needed) for name in names]
    )
    own = {names[position], *_FIELDS}

    def decorate(method: Any) -> Any:
        lists = dict(
            zip(
                [*inspect.signature(method).parameters][1:],
                [name for name in names if name not in _FIELDS],
                strict=False,
            )
        )

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            is_single = len(args) > position and isinstance(args[position], torch.Tensor)
            if not is_single and own.isdisjoint(kwargs):
                return method(self, *args, **kwargs)  # 0.2 us slower than without this function
            kwargs = {lists.get(name, name): value for name, value in kwargs.items()}
            arguments = signature.bind(*args, **kwargs).arguments
            is_single, chosen = isinstance(arguments[names[position]], torch.Tensor), options()
            for name in _FIELDS.keys() & arguments.keys():
                value = arguments.pop(name)
                if value is not None:
                    setattr(chosen, _FIELDS[name], value)
            return method(self, *([value] if is_single else value for value in arguments.values()), chosen)

        return call

    return decorate


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


def root_of(options: Any) -> int:
    """Return the root in the options of a call of torch, by default 0."""
    return 0 if options is None else options.rootRank


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
    _copy_bytes(tensor, result)


def _copy_bytes(tensor: torch.Tensor, result: np.ndarray) -> None:
    values = torch.from_numpy(np.ascontiguousarray(result).reshape(-1).view(np.uint8))
    tensor.detach().copy_(values.view(tensor.dtype).reshape(tensor.shape))


def write_each(tensors: Sequence[torch.Tensor], results: Sequence[np.ndarray | torch.Tensor]) -> None:
    """Write each result into its tensor."""
    for tensor, result in zip(tensors, results, strict=True):
        write(tensor, result)


def overlap(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> bool:
    """Return whether an output's memory overlaps an input or another output."""
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, is_output)
        for is_output, tensors in ((False, inputs), (True, outputs))
        for tensor in tensors
        if tensor.nbytes and is_in_place(tensor)
    )
    read = written = 0  # the ends of the spans before
    for start, end, is_output in spans:
        if start < written or (is_output and start < read):
            return True
        read, written = (read, end) if is_output else (max(read, end), written)
    return False


def room(tensor: torch.Tensor, apart: bool = False) -> np.ndarray:
    """Return memory for the bytes of a tensor: its own, if it is contiguous on the host and not to be ``apart``."""
    return np.empty(tensor.nbytes, np.uint8) if apart or not is_in_place(tensor) else host_bytes(tensor)


def write_bytes(tensors: Sequence[torch.Tensor], rooms: Sequence[np.ndarray | None], apart: bool = False) -> None:
    """Copy bytes received in memory of `room` into the tensors that do not share it."""
    for tensor, data in zip(tensors, rooms, strict=False):
        if data is not None and (apart or not is_in_place(tensor)):
            _copy_bytes(tensor, data)
