"""The array libraries that need more than DLPack: PyTorch, TensorFlow, pandas, and values that are traced.

`library_of` finds the library of a value by the module that defines its class. A library is loaded already if there is
an array of it, so this file imports none on its own account.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

# Address, dtype, shape and strides: a transposed view has the address of its array.
_Key = tuple[int, str, tuple[int, ...], tuple[int, ...]]
# Buffers that were handed out as PyTorch tensors. The tensor keeps its buffer alive.
_as_tensors: weakref.WeakValueDictionary[_Key, np.ndarray] = weakref.WeakValueDictionary()


class Library(NamedTuple):
    """The conversions of one library."""

    # return an array of the library as a NumPy array, on the same memory where possible
    to_host: Callable[[Any], np.ndarray]
    # return a NumPy array as an array of the library, given one that it should be like
    from_host: Callable[[np.ndarray, Any], Any]
    copied: Callable[[Any], Any]  # return a copy of an array of the library
    # whether arrays of the library can be buffers that reductions change in place
    shares_buffers: bool = False


def library_of(value: Any) -> Library | None:
    """Return the library that defines the class of a value or one of its bases; None if DLPack or NumPy serves it."""
    kind: Any = type(value)
    return _library(kind)


@lru_cache(maxsize=4096)
def _library(kind: Any) -> Library | None:
    for each in kind.__mro__:
        root = each.__module__.partition(".")[0]
        if root in ("jax", "jaxlib") and each.__name__ == "Tracer":
            return _TRACED_BY_JAX
        if root == "tensorflow" and each.__name__ == "SymbolicTensor":
            return _TRACED_BY_TENSORFLOW
        if root in _LIBRARIES and each.__name__ in _ARRAYS.get(root, (each.__name__,)):
            return _LIBRARIES[root]
    return None


# --- PyTorch -----------------------------------------------------------------------------


def _from_torch(tensor: Any) -> np.ndarray:
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"a torch tensor of layout {tensor.layout} cannot be used: call its to_dense(), or give its rows as "
            "mpistrat.IndexedSlices"
        )
    # The data of a tensor that records gradients is meant. Conjugation and negation may be pending.
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.dtype is torch.bfloat16:
        return _shared(tensor.view(torch.int16)).view(_bfloat16())
    host = _shared(tensor)
    if _as_tensors:
        return _as_tensors.get(_key(host), host)
    return host


def _shared(tensor: Any) -> np.ndarray:
    """Return a tensor of the host as an array on the same memory."""
    try:
        host = np.from_dlpack(tensor)
    except (BufferError, RuntimeError):  # a dtype that DLPack or NumPy does not support
        host = tensor.numpy()
    # Older NumPy makes it read-only. Tensor.numpy() forbids torch to resize the storage, as its FSDP does.
    return host if host.flags.writeable else tensor.numpy()


def _to_torch(array: np.ndarray, like: Any) -> Any:
    torch = sys.modules["torch"]
    if _as_tensors and _as_tensors.get(_key(array)) is array and like.data_ptr() == array.ctypes.data:
        return like
    if array.dtype.name == "bfloat16":
        tensor = torch.asarray(array.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.asarray(array)
    return tensor.to(like.device)


def tensor_of_buffer(buffer: np.ndarray, like: Any) -> Any:
    """Return a buffer as a PyTorch tensor on the same memory, which `to_host` takes back as that buffer."""
    tensor = _to_torch(buffer, like)
    if buffer.dtype.name != "bfloat16":
        _as_tensors[_key(buffer)] = buffer
    return tensor


def _key(array: np.ndarray) -> _Key:
    return array.ctypes.data, array.dtype.str, array.shape, array.strides


def _bfloat16() -> Any:
    try:
        return importlib.import_module("ml_dtypes").bfloat16
    except ImportError as error:
        raise TypeError("bfloat16 tensors need the package ml_dtypes: pip install ml_dtypes") from error


# --- TensorFlow, pandas, JAX -------------------------------------------------------------


def _to_pandas(array: np.ndarray, like: Any) -> Any:
    """Return a Series or DataFrame with the labels of ``like``, as far as the shapes are the same."""
    if array.ndim != like.ndim:
        return array
    labels = {"index": like.index} if len(array) == len(like) else {}
    if like.ndim == 1:
        return type(like)(array, name=like.name, **labels)
    if array.shape[1] == like.shape[1]:
        labels["columns"] = like.columns
    return type(like)(array, **labels)


def _refuse_jax(value: Any) -> np.ndarray:
    raise TypeError(
        f"a value inside jax.jit or jax.grad has no content while JAX traces the function, got {value!r}: call "
        "the collective outside, or inside through jax.pure_callback, or through "
        "jax.experimental.io_callback(..., ordered=True) where each call must happen once and in order"
    )


def _refuse_tensorflow(value: Any) -> np.ndarray:
    raise TypeError(
        f"a tensor inside tf.function has no content while TensorFlow traces the function, got {value!r}: compute the "
        "gradients in tf.function, and call the collective outside"
    )


_TRACED_BY_JAX = Library(_refuse_jax, lambda array, like: array, _refuse_jax)
_TRACED_BY_TENSORFLOW = Library(_refuse_tensorflow, lambda array, like: array, _refuse_tensorflow)
_LIBRARIES = {
    "torch": Library(_from_torch, _to_torch, lambda tensor: tensor.detach().clone(), shares_buffers=True),
    "tensorflow": Library(
        np.asarray,
        lambda array, like: sys.modules["tensorflow"].convert_to_tensor(array),
        lambda value: sys.modules["tensorflow"].convert_to_tensor(np.array(value)),
    ),
    "pandas": Library(np.asarray, _to_pandas, lambda value: value.copy()),
}
# The classes of arrays of a library that also defines classes of other things: shapes, modules, indices.
_ARRAYS = {"torch": ("Tensor",), "pandas": ("Series", "DataFrame")}
