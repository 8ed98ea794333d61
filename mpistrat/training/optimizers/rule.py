"""How an optimizer changes arrays: what its steps need of it."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from mpistrat.runtime.gpu.kernels import EachElement
from mpistrat.values import IndexedSlices


class Rule(Protocol):
    """The methods of `Optimizer` that say how it changes arrays."""

    def update(
        self, weights: np.ndarray, gradient: np.ndarray, step: int, rate: float, *state: np.ndarray
    ) -> None: ...

    def update_consuming(
        self, weights: np.ndarray, gradient: np.ndarray, step: int, rate: float, *state: np.ndarray
    ) -> None: ...

    def update_rows(
        self, weights: np.ndarray, rows: IndexedSlices, step: int, rate: float, *state: np.ndarray
    ) -> None: ...

    def on_gpu(self, step: int, rate: float) -> tuple[EachElement, tuple[float, ...]] | None: ...


def for_update(gradient: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return a gradient in the dtype of its variable, as GPUs take it.

    A variable of 16 bits keeps a wider gradient: its own dtype has not the range of a gradient before it is scaled.
    """
    return gradient if dtype.itemsize < 4 else gradient.astype(dtype, copy=False)
