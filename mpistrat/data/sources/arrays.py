"""Sources of rows in memory: arrays, ranges, and the integers from a number on."""

from __future__ import annotations

import sys
import zlib
from typing import Any, NoReturn

import numpy as np

from mpistrat import nest
from mpistrat.data.rows import elements
from mpistrat.data.rows.contracts import IN_MEMORY_AT_ONCE, Source
from mpistrat.data.rows.spec import ArraySpec, row_bytes


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
                    f"array {number} of the structure is a scalar ({array.item()!r}): "
                    "axis 0 must be the axis of the samples"
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
