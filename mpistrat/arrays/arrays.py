"""Conversions between array libraries: only this file knows which library an array belongs to.

The package works on NumPy arrays on the host and CuPy arrays on a GPU. Arrays of other libraries (PyTorch, JAX, any
that supports DLPack or the array API) are converted to one of the two. Results are converted back. Conversions copy
only where the library requires it.

`library_of` finds the libraries that need more than DLPack, by the module that defines the class of a value: PyTorch,
TensorFlow, pandas, and values that are traced. A library is loaded already if there is an array of it, so this file
imports none on its own account.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays.device import Device, cupy_for, on_device
from mpistrat.arrays.gpu import pinned

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
    for base in kind.__mro__:
        root = base.__module__.partition(".")[0]
        if root in ("jax", "jaxlib") and base.__name__ == "Tracer":
            return _TRACED_BY_JAX
        if root == "tensorflow" and base.__name__ == "SymbolicTensor":
            return _TRACED_BY_TENSORFLOW
        if root in _LIBRARIES and base.__name__ in _ARRAYS.get(root, (base.__name__,)):
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


_ON_HOST = frozenset({1, 3, 11})  # DLPack's kDLCPU, kDLCUDAHost, kDLROCMHost
_ON_GPU = frozenset({2, 10, 13})  # kDLCUDA, kDLROCM, kDLCUDAManaged
_SCALARS = (np.generic, bool, int, float, complex)
_OF_NUMPY = (np.ndarray, *_SCALARS)
NUMBERS = frozenset(
    {int, float, complex, *(np.dtype(char).type for char in np.typecodes["AllInteger"] + np.typecodes["AllFloat"])}
)
"""Types of numbers: Python's and NumPy's. NumPy converts them as they are."""
_NO_ARRAYS = (str, bytes, bytearray, memoryview, range)  # sequences that hold none


def to_host(value: Any) -> np.ndarray:
    """Return a value as a NumPy array, a view where possible. Raise TypeError if it is not an array of numbers."""
    if type(value) is np.ndarray:
        return value
    refuse_masked(value)
    if isinstance(value, _OF_NUMPY):
        return np.asarray(value)
    if on_gpu(value):
        return pinned.download(to_cupy(value))
    library = library_of(value)
    if library is not None:
        array = library.to_host(value)
    elif hasattr(value, "__dlpack__") and not hasattr(value, "assign"):
        return _from_dlpack(value)
    else:
        array = _converted(value)
    if array.dtype == object:
        raise TypeError(f"expected an array or a number, got {value!r} of type {type(value).__name__}")
    return array


def from_host(result: np.ndarray, like: Any) -> Any:
    """Return a NumPy array as an array of the library of ``like``, on the device of ``like``."""
    if isinstance(like, np.ndarray):
        return result
    if isinstance(like, _SCALARS):
        return result[()]
    if on_gpu(like):
        with stream_of(like):
            return from_cupy(pinned.upload(result, device_of(to_cupy(like)).index), like)
    library = library_of(like)
    if library is not None:
        return library.from_host(result, like)
    if hasattr(like, "__dlpack__") and not hasattr(like, "assign"):
        from array_api_compat import array_namespace, device

        return array_namespace(like).asarray(result, device=device(like))
    return result


def dtype_and_shape(value: Any) -> tuple[np.dtype, tuple[int, ...]]:
    """Return the NumPy dtype and the shape of an array or variable of any library."""
    if on_gpu(value):
        value = to_cupy(value)
    elif library_of(value) is not None or not hasattr(value, "dtype"):
        value = as_numpy(value)
    return np.dtype(value.dtype), tuple(value.shape)


def buffer_like(buffer: Any, like: Any) -> Any:
    """Return a buffer as an array of the library of ``like`` on the same memory, if that library can change arrays."""
    library = library_of(like)
    if library is None or not library.shares_buffers or not isinstance(buffer, np.ndarray):
        return buffer
    return tensor_of_buffer(buffer, like)


def on_gpu(value: Any) -> bool:
    """Return whether a value lives on a GPU that CuPy can access."""
    if isinstance(value, _OF_NUMPY):
        return False
    cupy = sys.modules.get("cupy")  # most values are arrays of CuPy, if any are
    if cupy is not None and type(value) is getattr(cupy, "ndarray", None):
        return True
    if hasattr(value, "assign"):  # a variable
        return hasattr(value, "__cupy_get_ndarray__")
    dlpack_device = getattr(value, "__dlpack_device__", None)
    return dlpack_device is not None and dlpack_device()[0] in _ON_GPU and _cupy() is not None


def to_cupy(value: Any) -> Any:
    """Return a value on a GPU as a CuPy array of the same memory, ordered after its library's pending work."""
    cupy = _cupy()
    if type(value) is cupy.ndarray:
        return value
    if hasattr(value, "assign"):
        return value.__cupy_get_ndarray__()
    if hasattr(value, "detach"):  # a PyTorch tensor, which may record gradients, and be conjugated as a view
        value = value.detach().resolve_conj().resolve_neg()
        # Torch gives its memory to later work of its own stream, which does not wait for readers in CuPy's.
        cuda, number = sys.modules["torch"].cuda, value.device.index
        stream = cupy.cuda.get_current_stream(number).ptr
        # Of stream 0, ExternalStream would make a new stream.
        value.record_stream(cuda.ExternalStream(stream, number) if stream else cuda.default_stream(number))
    with on_device(value.__dlpack_device__()[1]):  # CuPy returns to the former GPU, and makes a context there
        return cupy.from_dlpack(value)


@contextmanager
def stream_of(*values: Any) -> Iterator[None]:
    """Let CuPy work in PyTorch's current stream, on its GPU, if all values, which are on a GPU, are tensors.

    Memory of a result goes back to the stream in which it was made: no other stream may still read it then.
    """
    if not all(hasattr(value, "detach") for value in values):
        yield
        return
    number, cuda = values[0].device.index, _cupy().cuda
    stream, wrap = sys.modules["torch"].cuda.current_stream(number), getattr(cuda.Stream, "from_external", None)
    # CuPy refuses to enter a stream of another GPU than the current one. ExternalStream is deprecated since 14.0.
    with on_device(number), wrap(stream) if wrap else cuda.ExternalStream(stream.cuda_stream, number):
        yield


def from_cupy(result: Any, like: Any) -> Any:
    """Return a CuPy array as an array of the library of ``like``, on the same memory."""
    if type(like) is type(result) or hasattr(like, "assign"):
        return result
    from array_api_compat import array_namespace

    number, current = result.device.id, _cupy().cuda.get_current_stream
    before = current(number)
    with stream_of(like):
        if (torch_stream := current(number)) != before:  # see `stream_of`: neither stream waits for the other's reads
            torch_stream.wait_event(before.record())
            _first, result = result, result.copy()  # the first is given up after the wait
            before.wait_event(torch_stream.record())
        return array_namespace(like).from_dlpack(result)


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Return the bytes of a contiguous array as a flat array on the same memory."""
    return array.reshape(-1).view(np.uint8) if array.nbytes else np.empty(0, np.uint8)


def numpy_or_cupy(value: Any) -> Any:
    """Return a value as an array on its device: a CuPy array on a GPU, else a NumPy array."""
    return to_cupy(value) if on_gpu(value) else to_host(value)


def ufunc_for(ufunc: Any, values: Iterable[Any]) -> Any:
    """Return CuPy's version of a ufunc if a value is on a GPU. NumPy's with a signature (``matmul``) refuse those."""
    return getattr(_cupy(), ufunc.__name__) if any(map(on_gpu, values)) else ufunc


def as_numpy(value: Any, dtype: Any = None) -> np.ndarray:
    """Return ``numpy.asarray`` of a value that may live on a GPU. Raise TypeError as `refuse_masked` does."""
    refuse_masked(value)
    if on_gpu(value) or library_of(value) is not None:
        return np.asarray(to_host(value), dtype)
    return _converted(value, dtype)


def copied(value: Any) -> Any:
    """Return a copy of an array of any library, or of a variable's value. Return other values unchanged."""
    refuse_masked(value)
    if isinstance(value, (np.ndarray, np.generic)):  # of which each replica has its own
        return value.copy()
    library = library_of(value)
    if library is not None:
        return library.copied(value)
    if hasattr(value, "read_value"):
        return value.read_value()
    if hasattr(value, "__dlpack__"):
        from array_api_compat import array_namespace

        return array_namespace(value).asarray(value, copy=True)
    return value


def can_be_filled(value: Any) -> bool:
    """Return whether `fill` can change the elements of an array, or of a variable that has ``assign``."""
    if isinstance(value, np.ndarray):
        return value.flags.writeable and not _is_masked(type(value))
    if hasattr(value, "assign") and hasattr(value, "__array__"):
        return True
    library = library_of(value)
    if library is not None:
        return library.shares_buffers
    return on_gpu(value) and isinstance(value, _cupy().ndarray)


def fill(target: Any, value: np.ndarray) -> None:
    """Set the elements of an array that `can_be_filled` to an array of its shape and dtype."""
    if hasattr(target, "assign"):
        target.assign(value)
    elif (library := library_of(target)) is not None:
        target.detach().copy_(library.from_host(value, target))
    else:
        target[...] = from_host(value, target)


def refuse_masked(value: Any) -> None:
    """Raise TypeError for a masked array, also in sequences: conversions drop masks, and masked values would count."""
    kind: Any = type(value)
    if kind is np.ndarray:
        return
    if _is_masked(kind):
        raise TypeError(
            f"masked arrays cannot be used, as their masked values would count, got one of shape {value.shape}: "
            "call its filled() or compressed() first"
        )
    if _holds_elements(kind):
        kinds: set[Any] = set(map(type, value))
        for element_kind in kinds:
            if _holds_elements(element_kind) or _is_masked(element_kind):
                for element in value:
                    refuse_masked(element)
                return


@lru_cache(maxsize=4096)  # issubclass of an abstract class takes 0.5 us
def _holds_elements(kind: Any) -> bool:
    return issubclass(kind, (list, tuple)) or (issubclass(kind, Sequence) and not issubclass(kind, _NO_ARRAYS))


def _is_masked(kind: type) -> bool:
    # numpy.ma is imported at its first use. The first two conditions avoid that in most programs.
    return issubclass(kind, np.ndarray) and kind is not np.ndarray and issubclass(kind, np.ma.MaskedArray)


def placed(value: Any, device: Device) -> Any:
    """Return a value as an array for a device: a NumPy array for a CPU, a CuPy array for a GPU."""
    if device.kind == "cpu" or on_gpu(value):
        return numpy_or_cupy(value)
    return pinned.upload(to_host(value), device.index)


def device_of(array: Any) -> Device:
    """Return the device of a NumPy or CuPy array."""
    return Device("cpu") if isinstance(array, np.ndarray) else Device("cuda", int(array.device.id))


def require_one_device(values: Iterable[Any], own: Device | None = None) -> Device:
    """Return the one GPU of all given CuPy arrays. Raise ValueError if there are several, or it is not ``own``."""
    gpus = sorted({device_of(value) for value in values})
    if own is not None and own.kind == "cuda" and gpus != [own]:
        other = next(gpu for gpu in gpus if gpu != own)
        raise ValueError(
            f"an array lives on {other}, and this rank's device is {own}: another rank may be working on {other}; "
            f"make arrays on {own} (`with cupy.cuda.Device({own.index}):`), or copy this one there"
        )
    if len(gpus) > 1:
        raise ValueError(f"the arrays of one call live on {' and '.join(map(str, gpus))}: a rank works on one device")
    return gpus[0]


@cache
def _cupy() -> Any:
    """Return the module ``cupy``, or None if it cannot be used."""
    try:
        return cupy_for("an array on a GPU")
    except RuntimeError:
        return None


def _converted(value: Any, dtype: Any = None) -> np.ndarray:
    """Return ``numpy.asarray`` of a value whose own ``__array__`` may return a masked array, as netCDF4's does."""
    array = np.asanyarray(value, dtype)  # numpy.asarray would drop the mask
    refuse_masked(array)
    return np.asarray(array)


def _from_dlpack(value: Any) -> np.ndarray:
    if value.__dlpack_device__()[0] in _ON_HOST:
        try:
            return np.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError):  # a dtype that DLPack or NumPy does not support
            return np.asarray(value)
    from array_api_compat import to_device

    return np.asarray(to_device(value, "cpu"))
