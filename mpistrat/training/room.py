"""Memory for arrays that come again and again."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpistrat.runtime.reused import new_memory

_ALIGNED = 64


class Room:
    """One piece of memory, which arrays of any sizes are views of. It grows when it has to, and is never given back.

    Examples
    --------
    >>> room = Room()
    >>> first = room.arrays({"a": np.zeros(3), "b": np.zeros((2, 2), "i4")})
    >>> first["a"].shape, first["b"].dtype
    ((3,), dtype('int32'))
    >>> again = room.arrays({"a": np.zeros(3)})["a"]
    >>> np.shares_memory(again, first["a"])
    True
    """

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def arrays(self, likes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Contiguous arrays of these shapes and dtypes. They take the place of those that were given out before."""
        ends = np.cumsum([0, *[-(-like.nbytes // _ALIGNED) * _ALIGNED for like in likes.values()]]).tolist()
        if ends[-1] > len(self._bytes):
            self._bytes = np.empty(0, np.uint8)  # the former goes first
            memory, start = new_memory(ends[-1])
            self._bytes = np.frombuffer(memory, np.uint8, ends[-1], start)
        return {
            name: self._bytes[start : start + like.nbytes].view(like.dtype).reshape(like.shape)
            for start, (name, like) in zip(ends, likes.items(), strict=False)
        }
