"""Horovod's gathers, broadcasts and exchanges of arrays of any library. Results have no history of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from mpistrat.arrays import arrays
from mpistrat.collectives import structures
from mpistrat.collectives.movement import moves
from mpistrat.integrations.hvd.handles import collective, in_place, one_by_one, refusals, with_handle
from mpistrat.integrations.hvd.job import ProcessSet, example, global_process_set
from mpistrat.integrations.hvd.reductions import named

__all__ = [
    "allgather",
    "allgather_async",
    "allgather_object",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "grouped_allgather",
    "grouped_allgather_async",
]

_Result = TypeVar("_Result")


@example("len(hvd.allgather(np.ones((2, 3)))) == 2 * hvd.size()", "True")
def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Return the rows of the arrays of all ranks, in the order of ranks. Collective.

    The number of rows may differ between ranks.

    Parameters
    ----------
    tensor : array
    name, process_set
        As for `allreduce`.

    Returns
    -------
    array

    Raises
    ------
    ValueError
        If the array is a scalar.
    MismatchError
        On every rank, if names, dtypes or the lengths of other axes than the first differ between ranks.
    """
    topology = process_set.topology
    with refusals("allgather", process_set):
        host = arrays.to_host(tensor)
        moves.checked_axis(host, 0)
    rows = _named_collective("allgather", name, process_set, lambda: moves.all_gather(topology, host, 0))
    return arrays.from_host(rows, tensor)


def broadcast_to_hosts(
    tensors: Sequence[Any], root_rank: int, name: str | None, process_set: ProcessSet, call: str
) -> list[np.ndarray]:
    """Return the arrays of one rank on every rank, as NumPy arrays. Collective; ``call`` is for messages."""
    topology = process_set.topology
    with refusals(call, process_set):
        root = process_set.place_of(root_rank)
        hosts = [arrays.to_host(tensor) for tensor in tensors]
    return collective(process_set, call, lambda: moves.broadcast(topology, hosts, named(name), root=root))


@example("float(hvd.broadcast(5.0 + hvd.rank(), root_rank=0))", "5.0")
def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the array of one rank on every rank. Collective.

    Parameters
    ----------
    tensor : array or number
        On other ranks it gives the shape and dtype.
    root_rank : int
        A rank of the job, also where a process set is given.
    name, process_set
        As for `allreduce`.

    Returns
    -------
    array or number

    Raises
    ------
    ValueError
        If ``root_rank`` is not in the process set.
    MismatchError
        On every rank, if names, roots, shapes or dtypes differ between ranks.
    """
    (host,) = broadcast_to_hosts([tensor], root_rank, name, process_set, "broadcast")
    return arrays.from_host(host, tensor)


@example("hvd.alltoall(np.full(hvd.size(), hvd.rank())).tolist() == [*range(hvd.size())]", "True")
def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send consecutive rows to rank 0, 1, and so on, and return the rows that came. Collective.

    Parameters
    ----------
    tensor : array
    splits : array of int, optional
        How many rows go to each rank; by default equally many.
    name, process_set
        As for `allreduce`.

    Returns
    -------
    array, or tuple of two arrays
        With ``splits`` also how many rows came from each rank.

    Raises
    ------
    ValueError
        If the splits do not make the rows.
    MismatchError
        On every rank, if names, dtypes or the lengths of other axes than the first differ between ranks.
    """
    topology = process_set.topology
    with refusals("alltoall", process_set):
        host = arrays.to_host(tensor)
        host_splits = None if splits is None else arrays.to_host(splits)
        if host_splits is not None and host_splits.dtype.kind not in "iu":
            raise ValueError(f"splits must be integers, not {host_splits.dtype}")
        lengths = None if host_splits is None else host_splits.tolist()

    array, received = _named_collective(
        "alltoall", name, process_set, lambda: moves.all_to_all(topology, host, lengths)
    )
    result = arrays.from_host(array, tensor)
    if host_splits is None:
        return result
    counts = np.array(received, host_splits.dtype)
    return result, arrays.from_host(counts, splits if hasattr(splits, "dtype") else tensor)


@example("hvd.barrier()")
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait for all ranks of a process set."""
    collective(process_set, "barrier", process_set.topology.barrier)


@example('hvd.broadcast_object({"epoch": 3} if hvd.rank() == 0 else None)', "{'epoch': 3}")
def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the (pickled) object of one rank on every rank. Collective."""
    topology = process_set.topology
    with refusals("broadcast_object", process_set):
        root = process_set.place_of(root_rank)
    return _named_collective("broadcast_object", name, process_set, lambda: topology.broadcast_object(obj, root))


@example("hvd.allgather_object(hvd.rank()) == [*range(hvd.size())]", "True")
def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the (pickled) objects of all ranks, in the order of ranks. Collective."""
    topology = process_set.topology
    return _named_collective("allgather_object", name, process_set, lambda: topology.all_gather_object(obj))


def _named_collective(call: str, name: str | None, process_set: ProcessSet, make: Callable[[], _Result]) -> _Result:
    """Return ``make()``, a collective, after the ranks have compared its name if the program gave one."""

    def compare_and_make() -> _Result:
        if name is not None:
            structures.agree(process_set.topology, call, named(name))
        return make()

    return collective(process_set, call, compare_and_make)


broadcast_, grouped_allgather = in_place(broadcast), one_by_one(allgather)
allgather_async, grouped_allgather_async = with_handle(allgather), with_handle(grouped_allgather)
broadcast_async, broadcast_async_ = with_handle(broadcast), with_handle(broadcast_)
alltoall_async = with_handle(alltoall)
