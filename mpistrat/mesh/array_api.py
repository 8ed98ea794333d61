"""The array API standard for cut arrays: functions of NumPy, which take a `ShardedArray` or refuse it by name.

Constructors without an array, such as ``zeros``, give an array that every rank has whole.
"""

from typing import Any

import array_api_compat.numpy
import numpy as np
from array_api_compat.numpy import *  # noqa: F403
from array_api_compat.numpy import fft, linalg  # noqa: F401

__array_api_version__ = array_api_compat.numpy.__array_api_version__


def result_type(*arrays_and_dtypes: Any) -> np.dtype[Any]:
    """Return the dtype of a result of these."""
    return np.result_type(*(each.dtype if hasattr(each, "redistribute") else each for each in arrays_and_dtypes))


def clip(x: Any, /, min: Any = None, max: Any = None) -> Any:
    """Return the elements, none of which is below ``min`` or above ``max``."""
    return np.clip(x, min, max)


def asarray(obj: Any, /, *, dtype: Any = None, device: Any = None, copy: bool | None = None) -> Any:
    """Return a cut array as it is, with another dtype or as a copy, and anything else as an array of NumPy."""
    if not hasattr(obj, "redistribute"):
        return array_api_compat.numpy.asarray(obj, dtype=dtype, device=device, copy=copy)
    return obj if dtype in (None, obj.dtype) and not copy else obj.astype(obj.dtype if dtype is None else dtype)
