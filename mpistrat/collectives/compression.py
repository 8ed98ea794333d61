"""Smaller messages between groups: low-rank and sparse approximations of arrays, whose errors are sent later."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

Memory = dict[str, np.ndarray]


class LossyCompression(ABC):
    """How the groups of a strategy send less than their arrays.

    What an exchange leaves out is kept on the rank that owns the array, and added to what it sends next (error
    feedback). The sum over all exchanges equals the sum of the arrays, except for the last error.
    """

    #: The names in `memory`. One is "error".
    kinds: tuple[str, ...] = ("error",)

    @abstractmethod
    def memory(self, value: np.ndarray) -> Memory:
        """Return what is kept between exchanges of arrays like this one. Empty if they are sent whole."""

    @abstractmethod
    def sums(self, values: list[np.ndarray], memories: list[Memory], groups: Any) -> list[np.ndarray]:
        """Add up approximations of arrays by a `BetweenGroups`, and keep errors in ``memories``. Collective."""


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
    The algorithm is that of T. Vogels, S. P. Karimireddy, M. Jaggi: "PowerSGD: Practical Low-Rank Gradient Compression
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
        if rank < 1:
            raise ValueError(f"rank must be at least 1, not {rank}")
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

    def sums(self, values: list[np.ndarray], memories: list[Memory], groups: Any) -> list[np.ndarray]:
        matrices = []
        for value, memory in zip(values, memories, strict=True):
            memory["error"] += value
            matrices.append(_as_matrix(memory["error"]))
        lefts = groups.sums([each @ memory["right"] for each, memory in zip(matrices, memories, strict=True)])
        lefts = [np.linalg.qr(each)[0] for each in lefts]
        rights = [each.T @ left for each, left in zip(matrices, lefts, strict=True)]
        for each, left, right in zip(matrices, lefts, rights, strict=True):
            each -= left @ right.T
        rights = groups.sums(rights)
        for memory, right in zip(memories, rights, strict=True):
            found = right.any(axis=0)  # a column of zeros, as of a first gradient that is 0, would stay so for ever
            memory["right"][:, found] = right[:, found]
        products = [left @ right.T for left, right in zip(lefts, rights, strict=True)]
        errors = [memory["error"] for memory in memories]
        return [each.view(like.dtype).reshape(like.shape) for each, like in zip(products, errors, strict=True)]


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
        if not 0 < share <= 1:
            raise ValueError(f"share must be in (0, 1], not {share!r}")
        self.share = float(share)

    def __repr__(self) -> str:
        return f"TopK(share={self.share})"

    def memory(self, value: np.ndarray) -> Memory:
        return {"error": np.zeros(value.shape, value.dtype)} if value.size > 1 else {}

    def sums(self, values: list[np.ndarray], memories: list[Memory], groups: Any) -> list[np.ndarray]:
        found = []
        for value, memory in zip(values, memories, strict=True):
            memory["error"] += value
            error = memory["error"].reshape(-1)
            count = max(1, int(self.share * error.size))
            where = np.argpartition(np.abs(error), -count)[-count:]
            positions, elements = groups.concatenated(where), groups.concatenated(error[where])
            error[where] = 0
            total = np.zeros_like(error)
            np.add.at(total, positions, elements)  # in the order of groups: the same bits in all
            found.append(total.reshape(value.shape))
        return found


def _as_matrix(value: np.ndarray) -> np.ndarray:
    """Return a view of a contiguous array as the matrix of real numbers whose two sides are the shortest together.

    Of a convolution, these are all but the channels that it makes, wherever a library puts these.
    """
    splits = [math.prod(value.shape[:axis]) for axis in range(1, value.ndim)]
    rows = value.reshape(min(splits, key=lambda rows: rows + value.size // rows), -1)
    return rows.view(rows.real.dtype)
