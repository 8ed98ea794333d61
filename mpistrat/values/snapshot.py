"""Copies of values that later writes do not change."""

from __future__ import annotations

from typing import Any

from mpistrat.arrays import arrays
from mpistrat.values.distributed import component
from mpistrat.values.indexed_slices import IndexedSlices


def snapshot(value: Any) -> Any:
    """Return a copy of this process's component of a value, or of the value itself: later writes do not change it."""
    value = component(value)
    if isinstance(value, IndexedSlices):
        return IndexedSlices(arrays.copied(value.values), arrays.copied(value.indices), value.dense_shape)
    return arrays.copied(value)
