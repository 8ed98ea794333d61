"""Sources of rows in memory: arrays, ranges, integers from a number on, and objects with a length and an index."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NoReturn

import numpy as np

from mpistrat import nest
from mpistrat.arrays import arrays
from mpistrat.data.rows import elements, spec
from mpistrat.data.rows.contracts import IN_MEMORY_AT_ONCE, Source
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
        self._at_once = IN_MEMORY_AT_ONCE // max(1, row_bytes(self.element_spec()))

    def __len__(self) -> int:
        return self._rows

    def element_spec(self) -> Any:
        return nest.map_structure(lambda x: ArraySpec(x.shape[1:], x.dtype), self._tree)

    def read(self, rows: np.ndarray) -> Any:
        if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (rows[1:] > rows[:-1]).all():
            run = slice(int(rows[0]), int(rows[-1]) + 1)
            return self._rebuild([values[run].copy() for values in self._arrays])
        return self._rebuild([values.take(rows, 0) for values in self._arrays])

    def at_once(self, share: float) -> int:
        return self._at_once

    def fingerprint(self) -> Any:
        return f"{self._rows} rows of {self.element_spec()}"

    def checksum(self) -> int:
        found = 0
        for array in self._arrays:
            found = zlib.crc32(np.ascontiguousarray(array).tobytes(), found)
        return found

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

    def at_once(self, share: float) -> int:
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
            # A column of pandas that may lack values. Its runs convert to integers or floats, by what is in each.
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
        many = getattr(sequence, "__getitems__", None)
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
        wanted, back = np.unique(rows, return_inverse=True)
        cuts = np.flatnonzero(np.diff(wanted) != 1) + 1
        if len(cuts) and hasattr(array, "oindex"):
            return in_native_order(arrays.as_numpy(array.oindex[wanted])[back])
        runs = [arrays.as_numpy(array[int(run[0]) : int(run[-1]) + 1]) for run in np.split(wanted, cuts)]
        return in_native_order(np.concatenate(runs)[back])

    def _elements(self, rows: np.ndarray, dtypes: Sequence[np.dtype] | None) -> Any:
        """Return elements of a sequence, read one by one, or a batch at a time by ``__getitems__``."""
        numbers = rows.tolist()
        found = [self._sequence[number] for number in numbers] if self._many is None else self._many(numbers)
        return elements.stack([elements.of_arrays(each) for each in found], dtypes)

    def fingerprint(self) -> Any:
        return f"{self._length} elements of {self._spec} in a {_name(self._sequence)}"

    def __repr__(self) -> str:
        return f"{self._length} elements of a {_name(self._sequence)}"


def _name(sequence: Any) -> str:
    return type(sequence).__name__
