"""Stands in for CuPy where no GPU is: NumPy's memory behind CuPy's interface, as far as the package uses it.

What CuPy refuses is refused: to become a NumPy array unasked, to be mixed with one. What CuPy puts off is put off:
copies and kernels wait in their stream until somebody waits for it (see `cupy.cuda`), so that a synchronisation that
is missing shows. Memory of two "GPUs" is kept apart by its label only.
"""

import ctypes as _ctypes
import sys as _sys

import numpy as _np

from cupy import cuda
from cupy._kernel import RawKernel

__all__ = ["RawKernel", "cuda", "ndarray"]
__version__ = "14.0 (a fake for tests)"
has_bfloat16 = True  # as of version 14. A test takes it away

_METHODS = {
    "all", "any", "argmax", "astype", "clip", "copy", "max", "mean", "min", "ravel", "reshape", "sum", "transpose",
    "view",
}  # fmt: skip


class ndarray(_np.lib.mixins.NDArrayOperatorsMixin):
    __array_priority__ = 100

    def __init__(self, shape, dtype=float, memptr=None):
        if memptr is None:
            self._made = empty(shape, dtype)
            self._begin(self._made._host)
        else:
            nbytes = int(_np.prod(shape)) * _np.dtype(dtype).itemsize
            memory = _np.frombuffer((_ctypes.c_char * nbytes).from_address(memptr.ptr), _np.uint8)
            self._begin(memory.view(dtype).reshape(shape), None, memptr.device_id)
            self._memory = memptr

    def _begin(self, host, base=None, device=None):
        self._host = host
        self._device = cuda.Device().id if device is None else device
        self.base = base

    def __del__(self):
        if _sys.is_finalizing():
            return
        if hasattr(self, "_pooled"):
            cuda.give(*self._pooled)
        elif self.base is None and not hasattr(self, "_memory") and not hasattr(self, "_made"):
            cuda.keep(self._host)  # its memory goes back to a pool, and the stream uses it in order

    def __array__(self, *_, **__):
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        if method != "__call__" or ufunc.signature is not None:
            return NotImplemented
        if any(
            hasattr(each, "assign") and not hasattr(each, "__cupy_get_ndarray__")
            for each in (*inputs, *kwargs.get("out", ()))
        ):
            return NotImplemented
        return _call(ufunc, *inputs, **kwargs)

    def __array_function__(self, function, types, args, kwargs):
        return _call(function, *args, **kwargs)

    def __getattr__(self, name):
        if name not in _METHODS:
            raise AttributeError(f"the fake cupy.ndarray has no attribute {name!r}")

        def method(*args, **kwargs):
            return _call(getattr(_np.ndarray, name), self, *args, **kwargs)

        return method

    def __getitem__(self, key):
        return _call(_np.ndarray.__getitem__, self, key)

    def __setitem__(self, key, value):
        _call(_np.ndarray.__setitem__, self, key, value)

    def __matmul__(self, other):
        return _call(_np.matmul, self, other)

    def __len__(self):
        return len(self._host)

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __bool__(self):
        return bool(self.get())

    def __float__(self):
        return float(self.get())

    def __int__(self):
        return int(self.get())

    def __repr__(self):
        return f"fake cupy {self.get()!r}"

    def item(self):
        return self.get().item()

    def tolist(self):
        return self.get().tolist()

    def get(self, stream=None, order="C", out=None, blocking=True):
        with self.device:
            (stream or cuda.get_current_stream()).synchronize()
        return self._host.copy()

    def set(self, array, stream=None):
        (stream or cuda.get_current_stream()).synchronize()
        self._host[...] = array

    dtype = property(lambda self: self._host.dtype)
    shape = property(lambda self: self._host.shape)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    nbytes = property(lambda self: self._host.nbytes)
    itemsize = property(lambda self: self._host.itemsize)
    flags = property(lambda self: self._host.flags)
    strides = property(lambda self: self._host.strides)
    T = property(lambda self: self.transpose())
    real = property(lambda self: _call(_np.real, self))
    imag = property(lambda self: _call(_np.imag, self))
    device = property(lambda self: cuda.Device(self._device))

    @property
    def data(self):
        address = self._host.__array_interface__["data"][0]
        return cuda.MemoryPointer(cuda.UnownedMemory(address, self.nbytes, self, self._device), 0)

    @property
    def __cuda_array_interface__(self):
        return self._host.__array_interface__

    def __dlpack_device__(self):
        return 2, self._device

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if stream is not None:
            cuda.stream_of(0 if stream == 1 else stream).wait_event(cuda.get_current_stream().record())
        return self._host


def _of(host, base=None, device=None):
    array = ndarray.__new__(ndarray)
    array._begin(host, base, device)
    return array


def _plain(value):
    if isinstance(value, ndarray):
        return value._host
    if hasattr(value, "__cupy_get_ndarray__"):
        return value.__cupy_get_ndarray__()._host
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    if isinstance(value, _np.ndarray):
        raise TypeError(f"Unsupported type {type(value)}")
    return value


def _wrapped(result, sources):
    if isinstance(result, (_np.ndarray, _np.generic)):
        result = _np.asarray(result)
        for source in sources:
            if source._host is result:
                return source
            if _np.may_share_memory(source._host, result):
                return _of(result, source if source.base is None else source.base, source._device)
        return _of(result)
    if isinstance(result, (list, tuple)):
        return type(result)(_wrapped(each, sources) for each in result)
    return result


def _sources(value):
    if isinstance(value, ndarray):
        return [value]
    if isinstance(value, (list, tuple)):
        return [source for each in value for source in _sources(each)]
    return []


def _call(function, *args, **kwargs):
    """What CuPy enqueues waits in the stream. What it would return is found by a call on the values of now."""
    stream, sources = cuda.get_current_stream(), _sources([*args, *kwargs.values()])
    plain, named = _plain(args), {k: _plain(v) for k, v in kwargs.items()}
    if _is_view(function, args):
        return _wrapped(function(*plain, **named), sources)

    cuda.nvrtc.check("#include <cuda_fp16.h>")  # CuPy's own kernels need the headers

    def run():
        with _np.errstate(all="ignore"):
            return function(*plain, **named)

    if function is _np.ndarray.__setitem__ and _is_view(_np.ndarray.__getitem__, args):
        _np.broadcast_to(plain[2], plain[0][plain[1]].shape)  # raises what CuPy raises
        stream.put(run)
        return None
    if named.get("out") is not None:
        out = named["out"]
        copies = tuple(map(_np.copy, out)) if isinstance(out, tuple) else out.copy()
        with _np.errstate(all="ignore"):
            function(*plain, **{**named, "out": copies})
        stream.put(run)
        out = kwargs["out"]
        return out[0] if isinstance(out, tuple) and len(out) == 1 else out
    if not _has_known_shape(function, args):
        stream.synchronize()
        return _wrapped(run(), sources)
    try:
        found = run()
    except _np.linalg.LinAlgError:  # of the values of now
        stream.synchronize()
        found = run()
    if not isinstance(found, (_np.ndarray, _np.generic)):
        stream.synchronize()
        return _wrapped(run(), sources)
    found = _np.asarray(found)
    if any(source._host is found or _np.may_share_memory(source._host, found) for source in sources):
        return _wrapped(found, sources)
    result = empty(found.shape, found.dtype)
    host = result._host
    stream.put(lambda: host.__setitem__(..., run()))
    return result


def _has_known_shape(function, args):
    """Whether the shape of the result does not depend on values."""
    if function is _np.ndarray.__getitem__:
        keys = args[1] if isinstance(args[1], tuple) else (args[1],)
        return not any(isinstance(each, (ndarray, _np.ndarray, list)) for each in keys)
    return function not in (_np.unique, _np.nonzero, _np.flatnonzero, _np.ndarray.__setitem__)


def _is_view(function, args):
    """Whether nothing has to be done on the GPU."""
    if function in (_np.ndarray.view, _np.ndarray.transpose, _np.ndim, _np.shape, _np.real, _np.imag):
        return True
    if function is _np.ndarray.reshape:
        return args[0].flags.c_contiguous
    keys = args[1] if function is _np.ndarray.__getitem__ else [args]
    keys = keys if isinstance(keys, (tuple, list)) else [keys]
    if function is _np.ndarray.__getitem__ and sum(type(each) is int for each in keys) == args[0].ndim:
        return False  # NumPy gives no view of one element
    return all(each is None or each is Ellipsis or type(each) in (int, slice) for each in keys)


def empty(shape, dtype=float):
    shape = (shape,) if isinstance(shape, (int, _np.integer)) else tuple(shape)
    nbytes = int(_np.prod(shape)) * _np.dtype(dtype).itemsize
    memory, key = cuda.take(nbytes)
    array = _of(memory.view(dtype).reshape(shape))
    array._pooled = memory, key
    return array


def empty_like(array, dtype=None):
    return empty(array.shape, dtype or array.dtype)


class _Function:
    def __init__(self, function):
        self._function = function

    def __call__(self, *args, **kwargs):
        return _call(self._function, *args, **kwargs)


def asarray(value, dtype=None):
    if isinstance(value, ndarray):
        return value if dtype in (None, value.dtype) else value.astype(dtype)
    if hasattr(value, "__cuda_array_interface__"):
        cuda.get_current_stream().synchronize()
        return _of(_np.asarray(_Interface(value)), base=value)
    if hasattr(value, "__cupy_get_ndarray__"):
        return value.__cupy_get_ndarray__()
    return array(value, dtype)


def array(value, dtype=None, copy=True):
    if isinstance(value, ndarray):
        return value.astype(dtype or value.dtype)
    host = _np.array(value, dtype)
    made = empty(host.shape, host.dtype)
    target = made._host
    cuda.get_current_stream().put(lambda: target.__setitem__(..., host))
    return made


class _Interface:
    def __init__(self, value):
        self._value = value
        self.__array_interface__ = value.__cuda_array_interface__


def asnumpy(value):
    return value.get() if isinstance(value, ndarray) else _np.asarray(value)


def from_dlpack(value):
    device = value.__dlpack_device__()
    if device[0] != 2:
        raise ValueError("not on a GPU")
    before = cuda.runtime.getDevice()
    cuda.runtime.setDevice(device[1])
    try:
        host = value.__dlpack__(stream=cuda.get_current_stream().ptr)
    finally:
        cuda.runtime.setDevice(before)  # always, which makes a context there
    if host.dtype.name == "bfloat16" and not has_bfloat16:
        raise NotImplementedError("CuPy does not support bfloat16 yet")
    return _of(host, base=value, device=device[1])


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    found = getattr(_np, name)
    return found if isinstance(found, type) or not callable(found) else _Function(found)
