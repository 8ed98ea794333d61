"""Source of the elements of an object with a length and an index."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from mpistrat import nest
from mpistrat.arrays import arrays
from mpistrat.data.rows import elements, spec
from mpistrat.data.rows.contracts import Source
from mpistrat.data.rows.spec import ArraySpec, in_native_order


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
        self._gather = _ArrayReader(sequence) if is_array else _ElementReader(sequence)

    def __len__(self) -> int:
        return self._length

    @cached_property
    def _spec(self) -> Any:
        return nest.map_structure(lambda x: ArraySpec(x.shape[1:], x.dtype), self._gather(np.zeros(1, np.int64)))

    def element_spec(self) -> Any:
        return self._spec

    def read(self, rows: np.ndarray) -> Any:
        if not len(rows):
            return spec.zeros(self._spec, 0)
        if isinstance(self._gather, _ArrayReader):
            return self._gather(rows)
        return self._gather(rows, elements.dtypes_of(self._spec))

    def fingerprint(self) -> Any:
        return f"{self._length} elements of {self._spec} in a {_name(self._sequence)}"

    def __repr__(self) -> str:
        return f"{self._length} elements of a {_name(self._sequence)}"


class _ArrayReader:
    """The rows of an object with ``shape`` and ``dtype``, read in runs, or in one call if it has ``oindex``."""

    def __init__(self, array: Any):
        arrays.refuse_masked(array)
        self._array = array

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        if isinstance(self._array, np.ndarray):
            return in_native_order(np.array(self._array[rows]))
        wanted, back = np.unique(rows, return_inverse=True)
        cuts = np.flatnonzero(np.diff(wanted) != 1) + 1
        if len(cuts) and hasattr(self._array, "oindex"):
            return in_native_order(arrays.as_numpy(self._array.oindex[wanted])[back])
        runs = [arrays.as_numpy(self._array[int(run[0]) : int(run[-1]) + 1]) for run in np.split(wanted, cuts)]
        return in_native_order(np.concatenate(runs)[back])


class _ElementReader:
    """The elements of a sequence, read one by one, or a batch at a time by ``__getitems__``."""

    def __init__(self, sequence: Any):
        self._sequence = sequence
        many = getattr(sequence, "__getitems__", None)
        self._many = many if callable(many) else None

    def __call__(self, rows: np.ndarray, dtypes: Sequence[np.dtype] | None = None) -> Any:
        numbers = rows.tolist()
        if self._many is not None:
            found: Sequence[Any] = self._many(numbers)
        else:
            found = [self._sequence[number] for number in numbers]
        return elements.stack([elements.of_arrays(each) for each in found], dtypes)


def _name(sequence: Any) -> str:
    return type(sequence).__name__
