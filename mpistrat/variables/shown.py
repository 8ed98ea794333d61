"""How variables show themselves."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat import representation
from mpistrat.arrays import arrays


def _own_values(variable: Any) -> str:
    own = arrays.to_host(variable.own_copy())
    return np.array2string(own, threshold=8, edgeitems=2, separator=" ").replace("\n", "")


def text(variable: Any) -> str:
    """Return a line with this replica's values. Never communicates."""
    kind = f"{type(variable).__name__} {variable.name!r}"
    return f"<{kind} shape={variable.shape} dtype={variable.dtype}, this replica: {_own_values(variable)}>"


def table(variable: Any) -> str:
    """Return an HTML table with this replica's values. Never communicates."""
    facts = {
        "name": variable.name,
        "shape": variable.shape,
        "dtype": str(variable.dtype),
        "synchronization": variable.synchronization.name,
        "aggregation": variable.aggregation.name,
        "trainable": variable.trainable,
        "device": variable.device,
        "this replica": _own_values(variable),
    }
    return representation.table(type(variable).__name__, facts)
