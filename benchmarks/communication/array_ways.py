"""Ways to reduce an array, a lower bound, and the check of the sums of all before they are timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

SIZES = "4KiB,64KiB,256KiB,1MiB,4MiB,16MiB"
PLAIN, BUFFERS, BOUND = "plain array", "buffer", "bound"
COPY, WIRE = "a copy in memory", "the wire"


def least_bytes(ranks_per_node: Sequence[int], nbytes: int) -> float:
    """Return the minimum of bytes that every node must send, or every rank of a single node.

    Patarasuk and Yuan 2009, theorem 1.
    """
    parts = len(ranks_per_node) if len(ranks_per_node) > 1 else ranks_per_node[0]
    return 2 * (parts - 1) / parts * nbytes


class ArrayWay(NamedTuple):
    """A way to reduce an array, and what is needed to check its sum.

    ``cases`` of the report show its time. ``times(k)`` reduces the array ``send``, of NumPy or CuPy, k times, and
    ``result()`` returns the sum.
    """

    cases: Sequence[str]
    times: Callable[[int], object]
    send: Any
    result: Callable[[], Any]


def wrong_sums(
    comm: Any,
    ways: Mapping[tuple[str, str], ArrayWay],
    to_device: Callable[[np.ndarray], Any] = lambda array: array,
    to_host: Callable[[Any], np.ndarray] = lambda array: array,
) -> list[str]:
    """Return the wrong sums of all ways. A bound copies its array. Set the arrays to zero, and so their sums."""
    import numpy as np  # not sooner, as above

    faults = []
    for (case, name), way in ways.items():
        pattern = np.arange(way.send.size, dtype=np.float32) % 1000
        own, factor = (1, 1) if case == BOUND else (comm.rank + 1, comm.size * (comm.size + 1) / 2)
        want = factor * pattern
        way.send[...] = to_device(own * pattern)
        way.times(1)
        got = to_host(way.result())
        if not np.array_equal(got, want.astype(np.float32)):
            i = int(np.flatnonzero(got != want)[0])
            faults.append(f"{case}, {name}: element {i} is {got[i]:g}, not {want[i]:g}")
        way.send[...] = 0
    return faults
