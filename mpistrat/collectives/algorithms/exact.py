"""The exact all-reduce: the same bits for any order of the values, as each sum is exact and rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.collectives.algorithms.contract import Algorithm, Cost
from mpistrat.collectives.algorithms.exact_sum import Exchange, exact_sum
from mpistrat.collectives.algorithms.hierarchical import HierarchicalAllReduce
from mpistrat.collectives.algorithms.mpi import MpiAllReduce, mpi_operation
from mpistrat.collectives.rings.segmented import segmented_ring_all_reduce
from mpistrat.runtime.limits import Limits
from mpistrat.runtime.process import mpi
from mpistrat.runtime.topology import Topology

_BLOCK = 32 << 10  # elements whose digits stay in the cache
_PIECE_BYTES = 512 << 10

_in_memory, _by_mpi = HierarchicalAllReduce(), MpiAllReduce()


class ExactAllReduce(Algorithm):
    """The all-reduce with exact floating point sums, by `exact_sum`.

    Sums of integers, maxima and minima have one result in any order. Each rank writes its values to its slot, and adds
    a slice of all slots. Between nodes a rail carries the exponents of a slice, 2 bytes per element, 4 for float64.
    It also carries the float64 sum or the integers of the slice, 8 bytes per element, mostly 16 for float64.
    """

    name = "exact"
    dtypes = "bBhHiIlLqQfdFD"
    meets = False
    by_name_only = True

    def cost(self, topology: Topology) -> Cost:
        return Cost(100e-6, 1 / 2e8)

    def piece_bytes(self, topology: Topology) -> int:
        if topology.memory is None:
            return topology.limits.chunk_bytes
        return min(_PIECE_BYTES, topology.memory.slot_bytes)

    def reduce(self, topology: Topology, combine: np.ufunc, send: np.ndarray, receive: np.ndarray) -> None:
        """Write the combination of all ranks' ``send`` into ``receive``, as `Algorithm.reduce` does.

        Raises
        ------
        ValueError
            On every rank, for a product of floating point numbers, whose roundings depend on the order.
        """
        topology.lock.only_meets = topology.memory is not None and len(topology.nodes) == 1
        if receive.dtype.kind in "iu":
            _in_any_order(topology, combine, send, receive)
        elif combine is np.add:
            _add(topology, send, receive)
        elif combine is np.multiply:
            raise topology.lock.on_all_ranks(
                ValueError(
                    'PROD of floating point numbers has no implementation="exact": use "ordered", whose bits depend '
                    "on the number of replicas"
                )
            )
        else:
            _in_any_order(topology, combine, send, receive)
            receive += receive.dtype.type(0)  # turns -0 into 0: they compare equal, so the order would decide
            receive[np.isnan(receive)] = np.nan


def _in_any_order(topology: Topology, combine: np.ufunc, send: np.ndarray, receive: np.ndarray) -> None:
    algorithm = _by_mpi if topology.memory is None else _in_memory
    algorithm.reduce(topology, combine, send, receive)


def _add(topology: Topology, send: np.ndarray, receive: np.ndarray) -> None:
    memory = topology.memory
    if memory is None:
        if send is receive:
            send = send.copy()  # read again for the elements whose float64 sum is not exact
        by_mpi = _exchange(topology.world, topology.limits)
        exact_sum([_rows(send, receive.dtype)], _reals(receive), topology.size, by_mpi)
        return
    own, rows = memory.slots(send.dtype, len(send))
    own[...] = send
    topology.lock.meet()
    result = memory.total(receive.dtype, len(receive))
    one_node = len(topology.nodes) == 1
    slices = memory.size if one_node else min(topology.ranks_per_node)
    if memory.rank < slices:
        first, last = (len(send) * i // slices for i in (memory.rank, memory.rank + 1))
        step = _BLOCK if one_node else max(1, last - first)
        exchange = None if one_node else _exchange(topology.rail, topology.limits)
        for start in range(first, last, step):
            part = slice(start, min(start + step, last))
            blocks = [_rows(row[part], receive.dtype) for row in rows]
            exact_sum(blocks, _reals(result[part]), topology.size, exchange)
    topology.lock.meet()
    receive[...] = result


def _reals(values: np.ndarray) -> np.ndarray:
    return values.view(values.real.dtype) if values.dtype.kind == "c" else values


def _rows(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return _reals(values.astype(dtype, copy=False)).reshape(1, -1)


def _exchange(comm: Any, limits: Limits) -> Exchange:
    """Return a function that combines arrays over a communicator; their result must not depend on the order."""

    def exchange(ufunc: np.ufunc, array: np.ndarray) -> None:
        if array.nbytes < limits.exact_ring_bytes:
            comm.Allreduce(mpi.start().IN_PLACE, array, mpi_operation(ufunc, array.dtype))
        else:
            segmented_ring_all_reduce(comm, ufunc, array, limits.segment_bytes)

    return exchange
