"""Horovod's gathers, broadcasts and exchanges of arrays of any library. Results have no history of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.collectives import structures
from mpistrat.collectives.movement import all_gather, all_to_all
from mpistrat.collectives.movement import broadcast as broadcasts
from mpistrat.integrations.hvd.all_reduce import copy_into
from mpistrat.integrations.hvd.handles import Handle
from mpistrat.integrations.hvd.job import global_process_set
from mpistrat.integrations.hvd.joining import collective, refusals
from mpistrat.integrations.hvd.process_sets import ProcessSet
from mpistrat.integrations.hvd.reductions import named
from mpistrat.runtime import arrays


def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Return the rows of the arrays of all ranks, in the order of ranks. Collective.

    The number of rows may differ between ranks.

    Parameters
    ----------
    tensor : array
    name : str, optional
        The ranks compare it.
    process_set : ProcessSet

    Returns
    -------
    array

    Raises
    ------
    ValueError
        If the array is a scalar.
    MismatchError
        On every rank, if names, dtypes or the lengths of other axes than the first differ between ranks.

    Examples
    --------
    >>> import numpy as np
    >>> import mpistrat.integrations.hvd as hvd
    >>> hvd.init()
    >>> len(hvd.allgather(np.ones((2, 3)))) == 2 * hvd.size()
    True
    """
    topology = process_set.topology
    with refusals("allgather", process_set):
        host = arrays.to_host(tensor)
        all_gather.checked_axis(host, 0)

    def make() -> np.ndarray:
        if name is not None:
            structures.agree(topology, "allgather", named(name))
        return all_gather.all_gather(topology, host, 0)

    return arrays.from_host(collective(process_set, "allgather", make), tensor)


def allgather_async(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Gather as `allgather`, and return a handle for `synchronize`. Collective.

    Examples
    --------
    >>> import numpy as np
    >>> import mpistrat.integrations.hvd as hvd
    >>> hvd.init()
    >>> len(hvd.synchronize(hvd.allgather_async(np.ones(2)))) == 2 * hvd.size()
    True
    """
    return Handle(allgather(tensor, name, process_set))


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Gather several arrays, one after the other, as `allgather`. Collective.

    Examples
    --------
    >>> import numpy as np
    >>> import mpistrat.integrations.hvd as hvd
    >>> hvd.init()
    >>> len(hvd.grouped_allgather([np.ones(2), np.zeros(3)]))
    2
    """
    return [allgather(each, name, process_set) for each in tensors]


def grouped_allgather_async(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Gather as `grouped_allgather`, and return a handle for `synchronize`. Collective.

    Examples
    --------
    >>> import numpy as np
    >>> import mpistrat.integrations.hvd as hvd
    >>> hvd.init()
    >>> len(hvd.synchronize(hvd.grouped_allgather_async([np.ones(2)])))
    1
    """
    return Handle(grouped_allgather(tensors, name, process_set))


def _broadcast(tensor: Any, root_rank: int, name: str | None, process_set: ProcessSet) -> np.ndarray:
    topology = process_set.topology
    with refusals("broadcast", process_set):
        root = process_set.place_of(root_rank)
        host = arrays.to_host(tensor)

    def make() -> np.ndarray:
        return broadcasts.broadcast(topology, [host], named(name), root=root)[0]

    return collective(process_set, "broadcast", make)


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
    name : str, optional
        The ranks compare it.
    process_set : ProcessSet

    Returns
    -------
    array or number

    Raises
    ------
    ValueError
        If ``root_rank`` is not in the process set.
    MismatchError
        On every rank, if names, roots, shapes or dtypes differ between ranks.

    Examples
    --------
    >>> import mpistrat.integrations.hvd as hvd
    >>> hvd.init()
    >>> float(hvd.broadcast(5.0 + hvd.rank(), root_rank=0))
    5.0
    """
    return arrays.from_host(_broadcast(tensor, root_rank, name, process_set), tensor)


def broadcast_(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Overwrite an array with that of one rank, as `broadcast`, and return it. Collective.

    Examples
    --------
    >>> import numpy as np
    >>> import mpistrat.integrations.hvd as hvd
    >>> hvd.init()
    >>> hvd.broadcast_(np.ones(2) * hvd.rank(), root_rank=0)
    array([0., 0.])
    """
    return copy_into(tensor, _broadcast(tensor, root_rank, name, process_set))


def broadcast_async(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Broadcast as `broadcast`, and return a handle for `synchronize`. Collective.

    Examples
    --------
    >>> import mpistrat.integrations.hvd as hvd
    >>> hvd.init()
    >>> float(hvd.synchronize(hvd.broadcast_async(5.0, root_rank=0)))
    5.0
    """
    return Handle(broadcast(tensor, root_rank, name, process_set))


def broadcast_async_(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Broadcast as `broadcast_`, and return a handle for `synchronize`. Collective.

    Examples
    --------
    >>> import numpy as np
    >>> import mpistrat.integrations.hvd as hvd
    >>> hvd.init()
    >>> hvd.synchronize(hvd.broadcast_async_(np.ones(2), root_rank=0))
    array([1., 1.])
    """
    return Handle(broadcast_(tensor, root_rank, name, process_set))


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send consecutive rows to rank 0, 1, and so on, and return the rows that came. Collective.

    Parameters
    ----------
    tensor : array
    splits : array of int, optional
        How many rows go to each rank; by default equally many.
    name : str, optional
        The ranks compare it.
    process_set : ProcessSet

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

    Examples
    --------
    >>> import numpy as np
    >>> import mpistrat.integrations.hvd as hvd
    >>> hvd.init()
    >>> hvd.alltoall(np.full(hvd.size(), hvd.rank())).tolist() == [*range(hvd.size())]
    True
    """
    topology = process_set.topology
    with refusals("alltoall", process_set):
        host = arrays.to_host(tensor)
        own = None if splits is None else arrays.to_host(splits)
        if own is not None and own.dtype.kind not in "iu":
            raise ValueError(f"splits must be integers, not {own.dtype}")

    def make() -> tuple[np.ndarray, list[int]]:
        if name is not None:
            structures.agree(topology, "alltoall", named(name))
        return all_to_all.all_to_all(topology, host, None if own is None else own.tolist())

    array, received = collective(process_set, "alltoall", make)
    result = arrays.from_host(array, tensor)
    if own is None:
        return result
    counts = np.array(received, own.dtype)
    return result, arrays.from_host(counts, splits if hasattr(splits, "dtype") else tensor)


def alltoall_async(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Exchange rows as `alltoall`, and return a handle for `synchronize`. Collective.

    Examples
    --------
    >>> import numpy as np
    >>> import mpistrat.integrations.hvd as hvd
    >>> hvd.init()
    >>> len(hvd.synchronize(hvd.alltoall_async(np.ones(hvd.size())))) == hvd.size()
    True
    """
    return Handle(alltoall(tensor, splits, name, process_set))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait for all ranks of a process set.

    Examples
    --------
    >>> import mpistrat.integrations.hvd as hvd
    >>> hvd.init()
    >>> hvd.barrier()
    """
    topology = process_set.topology
    collective(process_set, "barrier", topology.barrier)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the (pickled) object of one rank on every rank. Collective.

    Examples
    --------
    >>> import mpistrat.integrations.hvd as hvd
    >>> hvd.init()
    >>> hvd.broadcast_object({"epoch": 3} if hvd.rank() == 0 else None)
    {'epoch': 3}
    """
    topology = process_set.topology
    with refusals("broadcast_object", process_set):
        root = process_set.place_of(root_rank)

    def make() -> Any:
        if name is not None:
            structures.agree(topology, "broadcast_object", named(name))
        return topology.broadcast_object(obj, root)

    return collective(process_set, "broadcast_object", make)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the (pickled) objects of all ranks, in the order of ranks. Collective.

    Examples
    --------
    >>> import mpistrat.integrations.hvd as hvd
    >>> hvd.init()
    >>> hvd.allgather_object(hvd.rank()) == [*range(hvd.size())]
    True
    """
    topology = process_set.topology

    def make() -> list[Any]:
        if name is not None:
            structures.agree(topology, "allgather_object", named(name))
        return topology.all_gather_object(obj)

    return collective(process_set, "allgather_object", make)
