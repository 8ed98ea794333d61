"""Sources of rows of Python objects: arrays, ranges, sequences, and iterables, which are read from their beginning."""

from __future__ import annotations

import itertools
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NoReturn

import numpy as np

from mpistrat import nest
from mpistrat.arrays import arrays
from mpistrat.data.rows import elements, spec
from mpistrat.data.rows.contracts import IN_MEMORY_AT_ONCE, Source, StreamSource
from mpistrat.data.rows.spec import ArraySpec, in_native_order, row_bytes


class ArraySource(Source):
    """The rows of a structure of arrays of equal length."""

    in_memory = True

    def __init__(self, tree: Any):
        self._tree = nest.map_structure(elements.as_array, elements.lists_to_arrays(tree))
        self._arrays, self._rebuild = nest.flatten(self._tree)
        arrays = self._arrays
        if not arrays:
            raise ValueError("there is no array to make a dataset of: pass an array, or a tuple or dict of arrays")
        for number, array in enumerate(arrays):
            if array.ndim == 0:
                raise ValueError(
                    f"array {number} is a scalar ({array.item()!r}): axis 0 must be the axis of the samples"
                )
            if len(array) != len(arrays[0]):
                raise ValueError(
                    f"the arrays of a dataset must be equally long, but array 0 has {len(arrays[0])} rows "
                    f"and array {number} has {len(array)}"
                )
        self._rows = len(arrays[0])
        self._at_once = IN_MEMORY_AT_ONCE // max(1, row_bytes(self.element_spec()))  # rows may have no bytes

    def __len__(self) -> int:
        return self._rows

    def element_spec(self) -> Any:
        return nest.map_structure(lambda x: ArraySpec(x.shape[1:], x.dtype), self._tree)

    def read(self, rows: np.ndarray) -> Any:
        if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (rows[1:] > rows[:-1]).all():
            run = slice(int(rows[0]), int(rows[-1]) + 1)
            return self._rebuild([values[run].copy() for values in self._arrays])  # copied in half the time of take()
        return self._rebuild([values.take(rows, 0) for values in self._arrays])

    def rows_in_two_reads(self, share: float) -> int:
        return self._at_once

    def fingerprint(self) -> Any:
        return f"{self._rows} rows of {self.element_spec()}"

    def checksum(self) -> int:
        checksum = 0
        for array in self._arrays:
            checksum = zlib.crc32(np.ascontiguousarray(array).tobytes(), checksum)
        return checksum

    def __repr__(self) -> str:
        return f"{self._rows} rows of arrays"


class RangeSource(Source):
    """The integers of a range."""

    in_memory = True

    def __init__(self, numbers: range):
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def element_spec(self) -> ArraySpec:
        return ArraySpec((), np.int64)

    def read(self, rows: np.ndarray) -> np.ndarray:
        return self._numbers.start + rows * self._numbers.step

    def rows_in_two_reads(self, share: float) -> int:
        return IN_MEMORY_AT_ONCE // 8

    def __repr__(self) -> str:
        return repr(self._numbers)


class CountSource(RangeSource):
    """The integers from ``start`` on, without end."""

    length = None

    def __init__(self, start: int):
        super().__init__(range(start, sys.maxsize))
        self._start = start

    def __len__(self) -> NoReturn:
        raise TypeError(f"{self} is endless")

    def identity(self) -> dict[str, Any]:
        return {"source": repr(self)}

    def __repr__(self) -> str:
        return f"the integers from {self._start}"


class SequenceSource(Source):
    """The elements of a sequence, or the rows of an array-like object."""

    def __init__(self, sequence: Any):
        is_array = hasattr(sequence, "shape") and hasattr(sequence, "dtype")
        if is_array and hasattr(sequence.dtype, "na_value"):
            # A column of pandas that may lack values. A run would become integers or floats, by the values in it.
            sequence = arrays.as_numpy(sequence)
        for method in ("__getitem__",) if is_array else ("__len__", "__getitem__"):
            if not hasattr(sequence, method):
                raise TypeError(
                    f"from_sequence() needs an object with __len__ and __getitem__, but {type(sequence).__name__} "
                    f"has no {method}: use from_iterable()"
                )
        if is_array and not sequence.shape:
            raise ValueError("from_sequence() needs axis 0 to be the axis of the samples, but this array is a scalar")
        self._sequence = sequence
        # An array of zarr 3 has a shape, but no __len__.
        self._length = int(sequence.shape[0]) if is_array else len(sequence)
        if not self._length:
            raise ValueError(f"from_sequence() needs at least one element, but this {_name(sequence)} is empty")
        self._is_array = is_array
        if is_array:
            arrays.refuse_masked(sequence)
        many = getattr(sequence, "__getitems__", None)  # of PyTorch: the elements of a batch in one call
        self._many = many if callable(many) else None

    def __len__(self) -> int:
        return self._length

    @cached_property
    def _spec(self) -> Any:
        first = np.zeros(1, np.int64)
        rows = self._rows_of_array(first) if self._is_array else self._elements(first, None)
        return nest.map_structure(lambda x: ArraySpec(x.shape[1:], x.dtype), rows)

    def element_spec(self) -> Any:
        return self._spec

    def read(self, rows: np.ndarray) -> Any:
        if not len(rows):
            return spec.zeros(self._spec, 0)
        return self._rows_of_array(rows) if self._is_array else self._elements(rows, elements.dtypes_of(self._spec))

    def _rows_of_array(self, rows: np.ndarray) -> np.ndarray:
        """Return rows of an object with ``shape`` and ``dtype``, read in runs, or in one call if it has ``oindex``."""
        array = self._sequence
        if isinstance(array, np.ndarray):
            return in_native_order(np.array(array[rows]))
        # h5py, for one, wants ascending indices without repeats.
        wanted, back = np.unique(rows, return_inverse=True)
        cuts = np.flatnonzero(np.diff(wanted) != 1) + 1
        if len(cuts) and hasattr(array, "oindex"):
            return in_native_order(arrays.as_numpy(array.oindex[wanted])[back])
        runs = [arrays.as_numpy(array[int(run[0]) : int(run[-1]) + 1]) for run in np.split(wanted, cuts)]
        return in_native_order(np.concatenate(runs)[back])

    def _elements(self, rows: np.ndarray, dtypes: Sequence[np.dtype] | None) -> Any:
        """Return elements of a sequence, read one by one, or a batch at a time by ``__getitems__``."""
        numbers = rows.tolist()
        values = [self._sequence[number] for number in numbers] if self._many is None else self._many(numbers)
        return elements.stack([elements.of_arrays(value) for value in values], dtypes)

    def fingerprint(self) -> Any:
        return f"{self._length} elements of {self._spec} in a {_name(self._sequence)}"

    def __repr__(self) -> str:
        return f"{self._length} elements of a {_name(self._sequence)}"


def _name(sequence: Any) -> str:
    return type(sequence).__name__


class IterableSource(StreamSource):
    """The elements of an iterable. Their number is unknown."""

    def __init__(self, iterable: Iterable[Any] | Callable[[], Iterable[Any]]):
        if not isinstance(iterable, Iterable) and not callable(iterable):
            raise TypeError(f"from_iterable() needs an iterable, or a function that returns one, not {iterable!r}")
        self._iterable = iterable
        self._once = isinstance(iterable, Iterator)
        self._begun = False
        self._first: Any = None

    def open(self, iteration: int = 0) -> Iterator[Any]:
        """Return an iterator over all elements, in arrays of their own: a generator may fill one array again and again.

        Raise ValueError if the iterable is an iterator that was used already.
        """
        if self._once:
            if self._begun:
                raise ValueError(
                    f"a {type(self._iterable).__name__} yields its elements only once: give from_iterable() the "
                    "function that makes it"
                )
            self._begun = True
        return map(elements.copied, self._raw())

    def first(self) -> Any:
        """Return the first element. Raise ValueError if the iterable is empty."""
        if self._first is None:
            raw = self._raw()
            for element in raw:
                self._first = elements.copied(element)
                if self._once:
                    self._iterable = itertools.chain([self._first], raw)  # put it back
                break
            else:
                raise ValueError(f"{self} yields no elements, so their structure is unknown")
        return self._first

    def _raw(self) -> Iterator[Any]:
        if isinstance(self._iterable, Iterable):
            return iter(self._iterable)
        return iter(self._iterable())

    def __repr__(self) -> str:
        return f"an iterable ({getattr(self._iterable, '__name__', type(self._iterable).__name__)})"


class GeneratorSource(IterableSource):
    """The elements that a function yields. The signature says what each element has, None for any."""

    def __init__(self, generator: Callable[..., Iterable[Any]], args: tuple[Any, ...], signature: Any):
        if not callable(generator):
            raise TypeError(f"from_generator() needs a function that returns an iterable, not {generator!r}")
        self._generator, self._args, self._signature = generator, args, signature
        super().__init__(self._elements)

    def _elements(self) -> Iterator[Any]:
        for number, element in enumerate(self._generator(*self._args)):
            yield (element if self._signature is None else _as_signed(element, self._signature, f"element {number}"))

    def element_spec(self) -> Any:
        """Return the signature, if it has all shapes, or else the structure of the first element."""
        leaves, rebuild = nest.flatten(self._signature)
        if self._signature is None or any(leaf.shape is None for leaf in leaves):
            return super().element_spec()
        return rebuild([ArraySpec(leaf.shape, leaf.dtype) for leaf in leaves])

    def fingerprint(self) -> Any:
        return f"{self} {'' if self._signature is None else self._signature}"

    def __repr__(self) -> str:
        return f"a generator ({getattr(self._generator, '__name__', type(self._generator).__name__)})"


def signature_of(types: Any, shapes: Any, signature: Any) -> Any:
    """Return the signature, from either way to give it. Raise TypeError for both ways, or without shape and dtype."""
    if types is None and shapes is None:
        if signature is not None and (wrong := _not_specs(signature)):
            raise TypeError(f"output_signature must be an ArraySpec, or a tuple or dict of them, not {wrong[0]!r}")
        return signature
    if signature is not None or types is None:
        raise TypeError("from_generator() takes output_signature, or output_types with output_shapes, not both")
    if isinstance(types, list):
        raise TypeError(f"output_types must be a dtype, or a tuple or dict of them, not {types!r}")
    if shapes is None:
        return nest.map_structure(lambda dtype: _Typed(np.dtype(dtype)), types)
    return _with_shapes(types, shapes)


def _not_specs(part: Any) -> list[Any]:
    """Return what of a signature is neither a spec nor a tuple or dict."""
    if isinstance(part, (tuple, dict)):
        parts = part.values() if isinstance(part, dict) else part
        return [wrong for inner in parts for wrong in _not_specs(inner)]
    return [] if hasattr(part, "shape") and hasattr(part, "dtype") else [part]


class _Typed:
    """A dtype with any shape."""

    shape = None

    def __init__(self, dtype: np.dtype):
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"any shape of {self.dtype}"


def _with_shapes(types: Any, shapes: Any) -> Any:
    if isinstance(types, dict):
        return {key: _with_shapes(types[key], shapes[key]) for key in types}
    if isinstance(types, tuple):
        return tuple(_with_shapes(*pair) for pair in zip(types, shapes, strict=True))
    return ArraySpec(tuple(shapes), types)


def _as_signed(part: Any, like: Any, where: str) -> Any:
    """Return a part of an element with the dtypes of the signature."""
    if isinstance(like, dict):
        if not isinstance(part, dict) or {*part} != {*like}:
            raise TypeError(f"{where} of the generator must be a dict with the keys {[*like]}, not {part!r:.100}")
        return {key: _as_signed(part[key], like[key], f"{where}[{key!r}]") for key in like}
    if isinstance(like, tuple):
        if not isinstance(part, (tuple, list)) or len(part) != len(like):
            raise TypeError(f"{where} of the generator must be a tuple of {len(like)}, not {part!r:.100}")
        return tuple(_as_signed(p, s, f"{where}[{i}]") for i, (p, s) in enumerate(zip(part, like, strict=True)))
    array = arrays.as_numpy(part)
    dtype = np.dtype(like.dtype)
    # A Python number has no dtype of its own: it takes that of the signature, if its kind fits.
    python = not hasattr(part, "dtype")
    integers = python and array.dtype.kind in "iu" and dtype.kind in "iu"
    if not integers and not np.can_cast(array.dtype, dtype, "same_kind" if python else "safe"):
        raise TypeError(
            f"{where} of the generator is of {array.dtype}, but output_signature says {dtype}: convert it, or "
            "change the signature"
        )
    if like.shape is not None:
        fits = len(like.shape) == array.ndim and all(
            want is None or want == size for want, size in zip(like.shape, array.shape, strict=True)
        )
        if not fits:
            raise ValueError(f"{where} of the generator has shape {array.shape}, but output_signature has {like.shape}")
    return array.astype(dtype, copy=False)
