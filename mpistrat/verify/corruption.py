"""The error of a value that a fault has changed, and the search for the rank that has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpistrat.record import flight_record
from mpistrat.runtime.agreement.operation import ranks_in_words
from mpistrat.runtime.topology import Topology

_MOST = 1000  # elements of an error
_MOST_SHOWN = 3  # of its message


class CorruptionError(RuntimeError):
    """A value that is equal on all ranks by definition differs, or a result is not that of its values.

    Raised on every rank, before anything more is saved. Load the last checkpoint without the node that it names.

    Attributes
    ----------
    name : str
        The variable or the reduction.
    elements : tuple of tuple of int
        The indices of the wrong elements in a variable: at most 1000, of the first part that differs. In a reduction,
        the number of the array and that of its element.
    ranks : tuple of int
        The ranks that have the fault. All ranks, if no majority has equal copies or all have the same wrong result.
    values : tuple of tuple
        For each of ``elements`` the value on each rank.

    Examples
    --------
    >>> import mpistrat
    >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
    >>> try:
    ...     total = strategy.reduce("SUM", 1.0, axis=None)
    ... except mpistrat.CorruptionError as error:
    ...     print("leave out the nodes of", error.ranks)
    """

    name: str = ""
    elements: tuple[tuple[int, ...], ...] = ()
    ranks: tuple[int, ...] = ()
    values: tuple[tuple[object, ...], ...] = ()


def same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return for each element whether values are equal: NaN of any bits, and zeros of any sign."""
    equal: np.ndarray = (a == b) | ((a != a) & (b != b))
    return equal


def suspects(copies: Sequence[np.ndarray]) -> tuple[int, ...]:
    """Return the ranks whose copy is not that of more than half of the ranks; all ranks if there is no such copy.

    >>> suspects([np.ones(2), np.ones(2), np.zeros(2)])
    (2,)
    >>> suspects([np.ones(2), np.zeros(2)])
    (0, 1)
    """
    for copy in copies:
        others = tuple(rank for rank, other in enumerate(copies) if not same(copy, other).all())
        if 2 * len(others) < len(copies):
            return others
    return tuple(range(len(copies)))


def corruption(
    topology: Topology,
    name: str,
    what: str,
    copies: Sequence[np.ndarray],
    ranks: tuple[int, ...],
    wrong: np.ndarray,
    element: Callable[[int], tuple[int, ...]],
) -> CorruptionError:
    """Return the error of all ranks for elements ``wrong`` of a block, of which each rank has a copy.

    ``element(i)`` is the index of an element of the block in its array. ``ranks`` may have the fault.
    """
    numbers = [*map(int, np.flatnonzero(wrong)[:_MOST])]
    count, elements = int(wrong.sum()), tuple(map(element, numbers))
    shown = "; ".join(
        f"[{', '.join(map(str, index))}] is " + ", ".join(f"{copy[i]} on rank {r}" for r, copy in enumerate(copies))
        for index, i in zip(elements[:_MOST_SHOWN], numbers, strict=False)
    )
    more = f"; {count} elements in all" if count > _MOST_SHOWN else ""
    on = ", ".join(f"rank {rank} ({topology.hosts[rank]})" for rank in ranks)
    fault = f"{on} has" if len(ranks) < topology.size else f"one of {on} has"
    record = flight_record.current()
    step = "" if record is None else f", step {record.steps}"
    error = CorruptionError(
        f"rank {topology.rank}: {what}: {shown}{more}. {fault} the fault: memory, a core or a device; or the program "
        "wrote another value there, which MPISTRAT_DEBUG=variables finds (collective number "
        f"{topology.lock.sequence}{step}). Load the last checkpoint, without that node"
    )
    error.name, error.elements, error.ranks = name, elements, ranks
    error.values = tuple(tuple(copy[i] for copy in copies) for i in numbers)
    flight_record.note(f"corruption of {name}, {ranks_in_words(ranks)}")
    return topology.lock.on_all_ranks(error)
