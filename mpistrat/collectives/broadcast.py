"""Replica 0's arrays, on every replica."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from mpistrat.runtime.operation import operation
from mpistrat.runtime.topology import Topology

# Below 2^31 bytes, where older MPI libraries end.
_CHUNK_BYTES = 1 << 30


def broadcast(
    topology: Topology, values: Sequence[np.ndarray], *details: Hashable, root: int = 0
) -> list[np.ndarray]:
    """New arrays that hold those of rank ``root``; the other ranks' say dtype and shape.

    ``details`` are words that must be equal on all ranks too. ``MPI_Bcast`` (MPI 4.1 section 6.4).
    """
    out = [np.array(value, order="C") for value in values]
    for each in out:
        if each.dtype.hasobject:
            raise TypeError(f"arrays of Python objects ({each.dtype}) cannot be broadcast")
    what = operation("broadcast", root, *details, *((each.dtype, each.shape) for each in out))
    with topology.turn(what):
        if topology.size > 1:
            for each in out:
                data = each.reshape(-1).view(np.uint8) if each.size else each.reshape(-1)
                for start in range(0, data.nbytes, _CHUNK_BYTES):
                    topology.world.Bcast(data[start : start + _CHUNK_BYTES], root)
    return out
