"""Sparse rows of an array."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.arrays import arrays


class IndexedSlices:
    """Some rows of an array whose other rows are zero or unchanged.

    Parameters
    ----------
    values : array, shape (n, ...)
        The rows.
    indices : array of int, shape (n,)
        Index on axis 0 of each row. Rows of equal index add up.
    dense_shape : tuple of int, optional
        Shape of the whole array.

    Raises
    ------
    ValueError
        If the numbers of indices and rows differ, or an index is outside ``dense_shape``.
    TypeError
        If the indices are not integers on one axis.

    Examples
    --------
    >>> IndexedSlices([[1.0, 2.0]], [2], (4, 2)).to_dense()
    array([[0., 0.],
           [0., 0.],
           [1., 2.],
           [0., 0.]])
    """

    __slots__ = ("dense_shape", "indices", "values")

    def __init__(self, values: Any, indices: Any, dense_shape: tuple[int, ...] | None = None):
        self.values = arrays.numpy_or_cupy(values) if arrays.on_gpu(values) else arrays.as_numpy(values)
        self.indices = arrays.numpy_or_cupy(indices) if arrays.on_gpu(indices) else arrays.as_numpy(indices)
        self.dense_shape = None if dense_shape is None else tuple(int(n) for n in dense_shape)
        if self.indices.ndim != 1 or (self.indices.size and self.indices.dtype.kind not in "iu"):
            raise TypeError(f"indices are integers on one axis, not {self.indices.dtype} of shape {self.indices.shape}")
        if self.values.ndim == 0 or len(self.values) != len(self.indices):
            raise ValueError(f"{len(self.indices)} indices need as many rows, not values of shape {self.values.shape}")
        self.indices = self.indices.astype(np.int64, copy=False)
        if self.dense_shape is not None:
            if not self.dense_shape or self.values.shape[1:] != self.dense_shape[1:]:
                raise ValueError(f"rows of shape {self.values.shape[1:]} do not fit an array of {self.dense_shape}")
            if self.indices.size and not 0 <= self.indices.min() <= self.indices.max() < self.dense_shape[0]:
                raise ValueError(
                    f"indices from {self.indices.min()} to {self.indices.max()} are outside axis 0 of an array of "
                    f"shape {self.dense_shape}"
                )

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the rows."""
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the whole array; None if unknown."""
        return self.dense_shape

    def to_dense(self) -> np.ndarray:
        """Return the whole array, with the sum of rows of equal index.

        Raises
        ------
        ValueError
            If ``dense_shape`` was left out.
        """
        if self.dense_shape is None:
            raise ValueError("to_dense() needs the shape of the whole array: give IndexedSlices a dense_shape")
        dense = np.zeros(self.dense_shape, self.values.dtype)
        np.add.at(dense, arrays.to_host(self.indices), arrays.to_host(self.values))
        return arrays.from_host(dense, self.values)

    def __repr__(self) -> str:
        return f"IndexedSlices({len(self.indices)} rows of {self.dtype}, dense_shape={self.dense_shape})"
