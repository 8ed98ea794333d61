"""Values that behave like the array that they hold, and the methods of NumPy arrays that they have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from mpistrat.arrays import arrays

_ON_HOST = frozenset({np.ndarray, bool, int, float, complex, np.float32, np.float64, np.int64})
#: Methods that read the value, as in ``numpy.ndarray``.
READING = (
    *("all", "any", "argmax", "argmin", "argsort", "astype", "clip", "conj", "copy", "cumprod", "cumsum"),
    *("diagonal", "dot", "flatten", "item", "max", "mean", "min", "nonzero", "prod", "ravel", "repeat"),
    *("reshape", "round", "squeeze", "std", "sum", "swapaxes", "take", "tobytes", "tolist", "trace"),
    *("transpose", "var"),
)


if TYPE_CHECKING:
    from typing_extensions import Self

    class _Operators:
        """The operators, typed: NumPy's mixin returns Any, for which an editor completes nothing."""

        def __add__(self, other: Any) -> np.ndarray: ...
        def __neg__(self) -> np.ndarray: ...
        def __divmod__(self, other: Any) -> tuple[np.ndarray, np.ndarray]: ...
        def __iadd__(self, other: Any) -> Self: ...

        __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __add__
        __matmul__ = __rmatmul__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __add__
        __lt__ = __le__ = __gt__ = __ge__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __add__
        __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __add__
        __pos__ = __abs__ = __invert__ = __neg__
        __rdivmod__ = __divmod__
        __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = __ipow__ = __imatmul__ = __iadd__
        __iand__ = __ior__ = __ixor__ = __ilshift__ = __irshift__ = __iadd__

else:
    _Operators = np.lib.mixins.NDArrayOperatorsMixin


class ArrayLike(_Operators):
    """Operators, ufuncs and conversions of the array that `_read` returns.

    A subclass defines `_read`, which may communicate, and `_shape_and_dtype`, which must not. It defines
    `_write_result`, which stores the result of an in-place operation, if its values can be changed.
    """

    __slots__ = ()

    def _read(self) -> np.ndarray:
        raise NotImplementedError

    def _shape_and_dtype(self) -> tuple[tuple[int, ...], np.dtype]:
        array = self._read()
        return array.shape, array.dtype

    def _write_result(self, result: Any) -> None:
        raise TypeError(f"{type(self).__name__} cannot be changed in place")

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes. Reading it does not communicate."""
        return self._shape_and_dtype()[0]

    @property
    def dtype(self) -> np.dtype:
        """NumPy dtype. Reading it does not communicate."""
        return self._shape_and_dtype()[1]

    @property
    def ndim(self) -> int:
        """Number of axes. Reading it does not communicate."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements. Reading it does not communicate."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def itemsize(self) -> int:
        """Bytes of an element. Reading it does not communicate."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the value. Reading it does not communicate."""
        return self.size * self.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self._read()
        if type(array) is not np.ndarray:
            if copy is False:
                raise ValueError("a copy is needed to convert an array on a GPU to a NumPy array")
            array = arrays.to_host(array)
        if copy or (dtype is not None and array.dtype != dtype):
            if copy is False:
                raise ValueError(f"a copy is needed to convert {array.dtype} to {np.dtype(dtype)}")
            return np.array(array, dtype=dtype)
        # Read-only: a write to the view would miss the other copies of the value.
        view = array.view()
        view.flags.writeable = False
        return view

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the device of the array, for ``from_dlpack`` of other libraries."""
        return self._read().__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        """Return the array itself, not a copy, for ``from_dlpack`` of other libraries. Write to it by methods only."""
        return self._read().__dlpack__(**options)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        plain = [x._read() if isinstance(x, ArrayLike) else x for x in inputs]
        out = kwargs.get("out", ())
        if method == "at" or out:
            for i, operand in enumerate(plain[method == "at" :], method == "at"):
                arrays.refuse_masked(operand)  # an in-place result would lose the mask
                if hasattr(operand, "__array__") and not isinstance(operand, (np.ndarray, np.generic)):
                    plain[i] = arrays.numpy_or_cupy(operand)
        if method == "at":
            return self._at(ufunc, inputs[0], plain)
        if not _ON_HOST.issuperset(map(type, plain)):
            on_gpu = arrays.ufunc_for(ufunc, plain)
            if on_gpu is not ufunc:
                return _call_on_gpu(getattr(on_gpu, method), plain, kwargs, out)
        if not any(isinstance(x, ArrayLike) for x in out):
            return getattr(ufunc, method)(*plain, **kwargs)
        # Copies: a method of the object then writes the result to all copies of the value.
        kwargs["out"] = tuple(x._read().copy() if isinstance(x, ArrayLike) else x for x in out)
        results = getattr(ufunc, method)(*plain, **kwargs)
        outputs = []
        for target, result in zip(out, results if isinstance(results, tuple) else (results,), strict=True):
            if isinstance(target, ArrayLike):
                target._write_result(result)
            outputs.append(result if target is None else target)
        return tuple(outputs) if isinstance(results, tuple) else outputs[0]

    @staticmethod
    def _at(ufunc: np.ufunc, target: Any, plain: list[Any]) -> None:
        if isinstance(target, ArrayLike):
            plain[0] = np.array(plain[0])
        ufunc.at(*plain)
        if isinstance(target, ArrayLike):
            target._write_result(plain[0])

    @property
    def T(self) -> np.ndarray:
        """Array with its axes in reverse order."""
        return self._view().T

    def __format__(self, spec: str) -> str:
        return format(arrays.to_host(self._read())[()], spec) if spec else str(self)

    def _view(self) -> Any:
        """Return the array as a read-only view; a copy on a GPU, where arrays cannot be read-only."""
        array = self._read()
        if type(array) is not np.ndarray:
            return array.copy()
        view = array.view()
        view.flags.writeable = False
        return view

    def _item(self, key: Any) -> Any:
        return self._view()[key]

    __getitem__ = _item

    def __len__(self) -> int:
        shape = self.shape
        if not shape:
            raise TypeError("len() of an unsized value (shape ())")
        return shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._view())

    def __float__(self) -> float:
        return float(self._read())

    def __int__(self) -> int:
        return int(self._read())

    def __complex__(self) -> complex:
        return complex(self._read())

    def __bool__(self) -> bool:
        return bool(self._read())

    def __index__(self) -> int:
        return arrays.to_host(self._read()).__index__()


def _call_on_gpu(function: Any, plain: list[Any], kwargs: dict[str, Any], out: tuple[Any, ...]) -> Any:
    """Call a CuPy function with one output array: CuPy takes an array, where NumPy takes a tuple."""
    if not out:
        return function(*plain, **kwargs)
    (target,) = out
    if not isinstance(target, ArrayLike):
        return function(*plain, **{**kwargs, "out": target})
    target._write_result(function(*plain, **{**kwargs, "out": target._read().copy()}))
    return target


class ArrayMethods:
    """The methods of `READING`, which call the methods of ``numpy.ndarray`` on the value that `_view` returns."""

    __slots__ = ()

    if TYPE_CHECKING:  # set below, where no type checker sees it

        def sum(self, *args: Any, out: Any = None, **kwargs: Any) -> Any: ...

        all = any = argmax = argmin = argsort = astype = clip = conj = copy = cumprod = cumsum = diagonal = dot = sum
        flatten = item = max = mean = min = nonzero = prod = ravel = repeat = reshape = round = squeeze = std = sum
        swapaxes = take = tobytes = tolist = trace = transpose = var = sum

    def _view(self) -> Any:
        raise NotImplementedError

    def _write_result(self, result: Any) -> None:
        raise NotImplementedError


def _reading(name: str) -> Callable[..., Any]:
    def method(self: ArrayMethods, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        result = getattr(self._view(), name)(*args, **kwargs)
        if out is None:
            return result
        if isinstance(out, ArrayMethods):
            out._write_result(result)
        else:
            out[...] = result
        return out

    method.__name__ = name
    method.__qualname__ = f"ArrayMethods.{name}"
    method.__doc__ = f"Return what ``numpy.ndarray.{name}`` returns for the value."
    return method


for _name in READING:
    setattr(ArrayMethods, _name, _reading(_name))


#: What to call in place of a method that changes an array where it is.
_INSTEAD = {
    "fill": "call v.assign(np.full_like(v, value))",
    "sort": "call v.assign(np.sort(v))",
    "partition": "call v.assign(np.partition(v, kth))",
    "put": "set v[indices] = values",
    "resize": "the shape of a variable is fixed; np.resize(v, shape) returns an array",
}


class NotProvided:
    """Methods that raise NotImplementedError and name the call to make instead."""

    __slots__ = ()


def _refusing(name: str, instead: str) -> Callable[..., NoReturn]:
    def method(self: NotProvided, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is not provided: {instead}")

    method.__name__ = name
    method.__qualname__ = f"NotProvided.{name}"
    method.__doc__ = f"Raise NotImplementedError: {instead}."
    return method


for _name, _instead in _INSTEAD.items():
    setattr(NotProvided, _name, _refusing(_name, _instead))
