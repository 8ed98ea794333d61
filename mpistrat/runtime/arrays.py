"""The only file that knows which array library it holds.

The wire carries NumPy arrays. Whatever else a program uses (CuPy, PyTorch, JAX, anything that speaks
DLPack or the array API) is brought to the host here and given back as what it was.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_ON_HOST = frozenset({1, 3, 11})  # DLPack's kDLCPU, kDLCUDAHost, kDLROCMHost
_SCALARS = (np.generic, bool, int, float, complex)


def to_host(value: Any) -> np.ndarray:
    """This replica's value as a NumPy array, without a copy where the library allows.

    Raises
    ------
    TypeError
        If it is no array of numbers.
    """
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError("masked arrays cannot be combined over replicas: fill or compress them first")
    if isinstance(value, (np.ndarray, *_SCALARS)):
        return np.asarray(value)
    if hasattr(value, "__dlpack__") and not hasattr(value, "assign"):
        return _from_dlpack(value)
    array = np.asarray(value)
    if array.dtype == object:
        raise TypeError(f"expected an array or a number, got {value!r} of type {type(value).__name__}")
    return array


def from_host(result: np.ndarray, like: Any) -> Any:
    """A result on the host as an array of the library, and on the device, of ``like``."""
    if isinstance(like, np.ndarray):
        return result
    if isinstance(like, _SCALARS):
        return result[()]
    if hasattr(like, "__dlpack__") and not hasattr(like, "assign"):
        from array_api_compat import array_namespace, device

        return array_namespace(like).asarray(result, device=device(like))
    return result


def _from_dlpack(value: Any) -> np.ndarray:
    if value.__dlpack_device__()[0] in _ON_HOST:
        try:
            return np.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError):  # a dtype that DLPack or NumPy has no word for
            return np.asarray(value)
    from array_api_compat import to_device

    return np.asarray(to_device(value, "cpu"))
