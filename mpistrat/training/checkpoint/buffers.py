"""Memory that every save uses again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from mpistrat.memory.buffer_pool import new_memory
from mpistrat.runtime.affinity import cores

_ALIGNED = 64
_PIECE = 2 << 20
_THREADS = 4


class SaveBuffer:
    """A buffer that holds arrays of any shapes and dtypes, and is used again for the next ones.

    It grows when needed, and is never freed before the object.

    Examples
    --------
    >>> buffer = SaveBuffer()
    >>> first = buffer.arrays({"a": np.zeros(3), "b": np.zeros((2, 2), "i4")})
    >>> first["a"].shape, first["b"].dtype
    ((3,), dtype('int32'))
    >>> again = buffer.arrays({"a": np.zeros(3)})["a"]
    >>> np.shares_memory(again, first["a"])
    True
    """

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def arrays(self, likes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return contiguous arrays of the shapes and dtypes of ``likes``.

        They overwrite the arrays of the previous call.
        """
        ends = np.cumsum([0, *[-(-like.nbytes // _ALIGNED) * _ALIGNED for like in likes.values()]]).tolist()
        if ends[-1] > len(self._bytes):
            self._bytes = np.empty(0, np.uint8)  # frees the old memory before the new is made
            memory, start = new_memory(ends[-1])
            self._bytes = np.frombuffer(memory, np.uint8, ends[-1], start)
        return {
            name: self._bytes[start : start + like.nbytes].view(like.dtype).reshape(like.shape)
            for start, (name, like) in zip(ends, likes.items(), strict=False)
        }

    def copies(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return `arrays` with the same values."""
        out = self.arrays(values)
        pieces = []
        for name, value in values.items():
            target, source = out[name].reshape(-1), value.reshape(-1)
            step = max(1, _PIECE // value.itemsize)
            pieces += [
                (target[start : start + step], source[start : start + step]) for start in range(0, len(source), step)
            ]
        # One core alone does not use the bandwidth of memory.
        threads = min(_THREADS, len(cores() or (0,)), -(-len(self._bytes) // _PIECE))
        if threads < 2:
            _copy(pieces)
            return out
        with ThreadPoolExecutor(threads - 1, "mpistrat-copy") as pool:
            others = [pool.submit(_copy, pieces[i::threads]) for i in range(1, threads)]
            _copy(pieces[::threads])
            for other in others:
                other.result()
        return out


def _copy(pieces: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    for target, source in pieces:
        np.copyto(target, source)
