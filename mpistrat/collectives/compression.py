"""Smaller messages between groups: low-rank and sparse approximations of arrays, whose errors are sent later."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from mpistrat.collectives.reduction import new_array
from mpistrat.representation import require

Memory = dict[str, np.ndarray]


class LossyCompression(ABC):
    """A lossy compression of the arrays that the groups of a strategy exchange.

    What an exchange leaves out is kept on the rank that owns the array, and added to what it sends next (error
    feedback). The sum over all exchanges equals the sum of the arrays, except for the last error. An array that is not
    finite in one group is not in all, as after an all-reduce, and does not change what is kept.
    """

    #: The names in `memory`. One is "error".
    kinds: tuple[str, ...] = ("error",)

    @abstractmethod
    def memory(self, value: np.ndarray) -> Memory:
        """Return what is kept between exchanges of arrays like this one. Empty if they are sent whole."""

    @abstractmethod
    def sums(self, values: list[np.ndarray], memories: list[Memory], groups: Any) -> list[np.ndarray]:
        """Add up weighted approximations of contiguous arrays, and keep errors in ``memories``. Collective."""


class PowerSGD(LossyCompression):
    """Send an array as a product of two thin matrices: ``rank * (n + m)`` numbers in place of ``n * m``.

    The first axes of an array make the rows of the matrix, the others its columns, divided where the two are shortest
    together. Vectors, and arrays that would not become smaller, are sent whole.

    Parameters
    ----------
    rank : int
        The number of columns of the thin matrices. 1 to 4 are usual.

    Raises
    ------
    TypeError
        If ``rank`` is not an int.
    ValueError
        If it is below 1.

    Notes
    -----
    The algorithm is by T. Vogels, S. P. Karimireddy, M. Jaggi: "PowerSGD: Practical Low-Rank Gradient Compression
    for Distributed Optimization" (NeurIPS 2019): one step of the power method, begun with the last result.

    Examples
    --------
    >>> import mpistrat
    >>> mpistrat.experimental.PowerSGD(rank=4)
    PowerSGD(rank=4)
    """

    kinds = ("error", "right")

    def __init__(self, rank: int = 4):
        if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)):
            raise TypeError(f"rank must be an int, not {rank!r}")
        require(rank >= 1, "rank must be at least 1", rank)
        self.rank = int(rank)

    def __repr__(self) -> str:
        return f"PowerSGD(rank={self.rank})"

    def memory(self, value: np.ndarray) -> Memory:
        rows, columns = _as_matrix(value).shape if value.ndim > 1 and value.size else (1, 1)
        if self.rank * (rows + columns) >= rows * columns or value.dtype.char in "gG":
            return {}  # LAPACK has no long doubles
        # Equal in all groups. The method has converged to the first directions after some steps from any start.
        start = np.random.default_rng([rows, columns]).standard_normal((columns, self.rank))
        return {"error": np.zeros(value.shape, value.dtype), "right": start.astype(value.real.dtype)}

    @np.errstate(all="ignore")
    def sums(self, values: list[np.ndarray], memories: list[Memory], groups: Any) -> list[np.ndarray]:
        matrices, lefts = [], []
        for value, memory in zip(values, memories, strict=True):
            source, error = _as_matrix(value), _as_matrix(memory["error"])
            matrices.append(new_array(error.size, error.dtype).reshape(error.shape))
            lefts.append(np.empty((len(error), self.rank), error.dtype))
            for rows in _blocks(error):
                block = np.multiply(source[rows], groups.weight, out=matrices[-1][rows])
                block += error[rows]
                np.matmul(block, memory["right"], out=lefts[-1][rows])
        # Orthonormal columns, equal in all groups: the second product is then the coefficients of a projection.
        lefts = [np.linalg.qr(product)[0] for product in groups.sums(lefts)]
        owns = [left.T @ matrix for left, matrix in zip(lefts, matrices, strict=True)]
        totals = []
        for memory, matrix, left, own, right in zip(memories, matrices, lefts, owns, groups.sums(owns), strict=True):
            error, total = memory["error"], new_array(matrix.size, matrix.dtype).reshape(matrix.shape)
            for rows in _blocks(matrix):
                block = np.matmul(left[rows], own, out=total[rows])
                matrix[rows] -= block
                np.matmul(left[rows], right, out=block)
            totals.append(total.view(error.dtype).reshape(error.shape))
            if np.isfinite(right).all():  # in all groups alike
                memory["error"] = matrix.view(error.dtype).reshape(error.shape)
                nonzero = right.any(axis=1)  # a row of zeros, as of a first gradient that is 0, would stay so for ever
                memory["right"][:, nonzero] = right[nonzero].T
        return totals


class TopK(LossyCompression):
    """Send the largest elements of an array, with their positions.

    Parameters
    ----------
    share : float
        The share of the elements that each group sends, one at least. In (0, 1].

    Raises
    ------
    ValueError
        If ``share`` is out of range.

    Notes
    -----
    See S. U. Stich, J.-B. Cordonnier, M. Jaggi: "Sparsified SGD with Memory" (NeurIPS 2018).

    Examples
    --------
    >>> import mpistrat
    >>> mpistrat.experimental.TopK(share=0.01)
    TopK(share=0.01)
    """

    def __init__(self, share: float = 0.01):
        require(0 < share <= 1, "share must be in (0, 1]", share)
        self.share = float(share)

    def __repr__(self) -> str:
        return f"TopK(share={self.share})"

    def memory(self, value: np.ndarray) -> Memory:
        return {"error": np.zeros(value.shape, value.dtype)} if value.size > 1 else {}

    @np.errstate(all="ignore")
    def sums(self, values: list[np.ndarray], memories: list[Memory], groups: Any) -> list[np.ndarray]:
        totals = []
        for value, memory in zip(values, memories, strict=True):
            residual = value * groups.weight + memory["error"]
            error = residual.reshape(-1)
            count = max(1, int(self.share * error.size))
            largest = np.argpartition(np.abs(error), -count)[-count:]  # NaN comes last
            positions, elements = groups.concatenated(largest), groups.concatenated(error[largest])
            error[largest] = 0
            memory["error"] = residual if np.isfinite(elements).all() else memory["error"]  # in all groups alike
            total = np.zeros_like(error)
            np.add.at(total, positions, elements)  # in the order of groups: the same bits in all
            totals.append(total.reshape(value.shape))
        return totals


def _blocks(matrix: np.ndarray) -> list[slice]:
    """Return the rows of a matrix in blocks of 128 KiB, which stay in a cache."""
    rows = (128 << 10) // matrix[0].nbytes + 1
    return [slice(first, first + rows) for first in range(0, len(matrix), rows)]


def _as_matrix(value: np.ndarray) -> np.ndarray:
    """Return a view of a contiguous array as the matrix of real numbers whose two sides are the shortest together.

    Of a convolution, these are all but the channels that it makes, wherever a library puts these.
    """
    splits = [math.prod(value.shape[:axis]) for axis in range(1, value.ndim)]
    rows = value.reshape(min(splits, key=lambda rows: rows + value.size // rows), -1)
    return rows.view(rows.real.dtype)
