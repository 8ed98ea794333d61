"""The exact all-reduce: the same bits for any order of the values, as each sum is exact and rounded once.

For every element the ranks first agree on the largest and the smallest exponent of its values. The two exponents give
the number of integers that hold the sum without error. Each value is cut into digits relative to the largest exponent,
the digits are added as integers, and their total is rounded. The digits are the bins of Demmel and Nguyen ("Parallel
Reproducible Summation", IEEE Transactions on Computers, 2015). Here there are as many bins as the values need, so that
the result does not depend on the bins. If float64 holds the sum of float32 values without error, they are added as
float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpistrat.collectives.algorithms.contract import Algorithm, Cost
from mpistrat.collectives.algorithms.hierarchical import HierarchicalAllReduce, segmented_ring_all_reduce
from mpistrat.collectives.algorithms.mpi import MpiAllReduce, mpi_operation
from mpistrat.process import mpi
from mpistrat.runtime.topology import Limits, Topology

# Combines an array over all ranks, in place.
Exchange = Callable[[np.ufunc, np.ndarray], None]
_BLOCK = 32 << 10  # elements whose digits stay in the cache
_PIECE_BYTES = 512 << 10

_in_memory, _by_mpi = HierarchicalAllReduce(), MpiAllReduce()


class _Format:
    """The layout of a floating point type, and an unsigned type for its exponents."""

    def __init__(self, dtype: type, bits: type, exponent: type):
        info = np.finfo(dtype)
        self.bits: np.dtype = np.dtype(bits)
        self.exponent: np.dtype = np.dtype(exponent)
        self.precision = info.nmant + 1
        self.mantissa_bits = info.nmant
        self.magnitude = self.bits.type(np.iinfo(bits).max >> 1)
        self.beyond_finite = (1 << info.iexp) - 1
        self.bias = 1 - int(info.minexp)


_FORMATS = {
    np.dtype(np.float32): _Format(np.float32, np.uint32, np.uint8),
    np.dtype(np.float64): _Format(np.float64, np.uint64, np.uint16),
}


def exact_sum(blocks: Sequence[np.ndarray], out: np.ndarray, summands: int, exchange: Exchange | None = None) -> None:
    """Write the exact sum over all rows of all blocks of all ranks, rounded once, into ``out``.

    It is as in IEEE 754, with one NaN, and +0 for zero. Blocks have the shape (rows, count) and, as ``out``, the dtype
    float32 or float64. ``summands`` is at least the number of rows of all ranks. ``exchange(ufunc, array)`` combines a
    flat array over the ranks, in place; by default only this rank counts.
    """
    if not len(out):
        return
    kind = _FORMATS[blocks[0].dtype]
    largest, depth = _exponents(blocks, kind, exchange)
    headroom = summands.bit_length()
    finite = largest < kind.beyond_finite
    difficult = finite & (depth > 53 - headroom - kind.precision)
    if not difficult.all():
        total = np.zeros(len(out), np.float64)
        for block in blocks:
            total += _over_rows(np.add, block, dtype=np.float64)
        if exchange is not None:
            exchange(np.add, total)
        out[...] = total
    if not finite.all():
        _sum_beyond_finite(blocks, np.flatnonzero(~finite), out, exchange)
    if difficult.all():
        out[...] = _sum_digits(blocks, largest, int(depth.max()), kind, headroom, out.dtype, exchange)
    elif difficult.any():
        indices = np.flatnonzero(difficult)
        chosen = [block[:, indices] for block in blocks]
        deepest = int(depth[indices].max())
        out[indices] = _sum_digits(chosen, largest[indices], deepest, kind, headroom, out.dtype, exchange)


def _over_rows(ufunc: np.ufunc, block: np.ndarray, dtype: type | None = None) -> np.ndarray:
    return block[0] if len(block) == 1 else ufunc.reduce(block, axis=0, dtype=dtype)


def _exponents(blocks: Sequence[np.ndarray], kind: _Format, exchange: Exchange | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the biased exponent of each element's largest value, and its distance to the smallest value's."""
    count = blocks[0].shape[1]
    largest = np.zeros(count, kind.bits)
    smallest = np.full(count, np.iinfo(kind.bits).max, kind.bits)
    for block in blocks:
        if len(block):
            bits = block.view(kind.bits) & kind.magnitude
            np.maximum(largest, _over_rows(np.maximum, bits), out=largest)
            bits -= kind.bits.type(1)  # wraps around, so that a zero never is the smallest
            np.minimum(smallest, _over_rows(np.minimum, bits), out=smallest)
    ends = np.empty((2, count), kind.exponent)
    np.right_shift(largest, kind.mantissa_bits, out=largest)
    np.maximum(largest, 1, out=ends[0], casting="unsafe")
    np.right_shift(smallest, kind.mantissa_bits, out=smallest)
    np.clip(smallest, 1, kind.beyond_finite, out=smallest)
    np.subtract(kind.beyond_finite, smallest, out=ends[1], casting="unsafe")
    if exchange is not None:
        exchange(np.maximum, ends.reshape(-1))
    high = ends[0].astype(np.int32)
    return high, high + ends[1] - kind.beyond_finite


def _sum_beyond_finite(
    blocks: Sequence[np.ndarray], indices: np.ndarray, out: np.ndarray, exchange: Exchange | None
) -> None:
    """Write the sums of elements with an infinity or a NaN; their finite values do not matter."""
    total = np.zeros(len(indices), np.float64)
    for block in blocks:
        values = block[:, indices]
        total += np.where(np.isfinite(values), 0, values).sum(0, dtype=np.float64)
    if exchange is not None:
        exchange(np.add, total)
    out[indices] = np.where(np.isnan(total), np.nan, total)


def _sum_digits(
    blocks: Sequence[np.ndarray],
    largest: np.ndarray,
    depth: int,
    kind: _Format,
    headroom: int,
    dtype: np.dtype,
    exchange: Exchange | None,
) -> np.ndarray:
    """Return finite sums, computed with integers that hold ``width`` bits of each value."""
    width = 62 - headroom
    count = -(-(depth + kind.precision) // width)
    # In 64 bits: NumPy 1 would keep an array of 32 bits if a number of 64 bits is added.
    units = [largest.astype(np.int64) - (kind.bias - 1 + width * (k + 1)) for k in range(count)]
    scale, unscale = [_times_power(-unit) for unit in units], [_times_power(unit) for unit in units[:-1]]
    digits = np.zeros((count, len(largest)), np.int64)
    for block in blocks:
        rest = block.astype(np.float64, copy=False)
        for k in range(count - 1):
            digit = np.trunc(scale[k](rest))
            digits[k] += _over_rows(np.add, digit.astype(np.int64))
            rest = rest - unscale[k](digit)
        digits[-1] += _over_rows(np.add, scale[-1](rest).astype(np.int64))
    if exchange is not None:
        exchange(np.add, digits.reshape(-1))
    return _rounded(digits, width, units[0], dtype)


def _times_power(exponent: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that multiplies by a power of two, which need not be a normal float64 itself."""
    if exponent.min() > -1023 and exponent.max() < 1024:
        return partial(np.multiply, ((exponent + 1023) << 52).view(np.float64))
    return lambda values: np.ldexp(values, exponent)


def _rounded(digits: np.ndarray, width: int, unit: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return ``sum(digits[k] * 2 ** (unit - k * width))``, rounded to the nearest, ties to even.

    Of the 62 leading bits the last is set if a lower bit is set, which decides a tie.
    """
    if len(digits) == 1:
        return _times_power(unit)(digits[0].astype(dtype).astype(np.float64)).astype(dtype)
    _carry(digits, width)
    sign = np.where(digits[0] < 0, np.int64(-1), np.int64(1))
    digits *= sign
    _carry(digits, width)
    leading, sticky = digits[0], np.zeros(len(unit), bool)
    for digit in digits[1:]:
        # Clear the bit after the highest one, so that the conversion cannot round up to the next power of two.
        used = np.frexp((leading & ~(leading >> 1)).astype(np.float64))[1].astype(np.int64)
        room = np.clip(62 - used, 0, width)
        behind = width - room
        leading = (leading << room) | (digit >> behind)
        sticky |= (digit & ((np.int64(1) << behind) - 1)) != 0
        unit = unit - room
    leading |= sticky
    return _times_power(unit)((leading * sign).astype(dtype).astype(np.float64)).astype(dtype)


def _carry(digits: np.ndarray, width: int) -> None:
    """Carry between digits until all but the first are in ``[0, 2 ** width)``."""
    for k in range(len(digits) - 1, 0, -1):
        over = digits[k] >> width
        digits[k] -= over << width
        digits[k - 1] += over


class ExactAllReduce(Algorithm):
    """The all-reduce with exact floating point sums, by `exact_sum`. Other results do not depend on the order.

    Each rank adds a slice of all slots. Between nodes a rail carries the exponents of a slice, 2 bytes per element, 4
    for float64, and its float64 sum or integers, 8 bytes per element, mostly 16 for float64.
    """

    name = "exact"
    dtypes = "bBhHiIlLqQfdFD"
    by_name_only = True

    def cost(self, topology: Topology) -> Cost:
        return Cost(100e-6, 1 / 2e8)

    def piece_bytes(self, topology: Topology) -> int:
        if topology.memory is None:
            return topology.limits.chunk_bytes
        return min(_PIECE_BYTES, topology.memory.slot_bytes)

    def reduce(self, topology: Topology, combine: np.ufunc, send: np.ndarray, receive: np.ndarray) -> None:
        """Combine as `Algorithm.reduce`. Raise ValueError on every rank for a product of floating point numbers."""
        topology.lock.is_shared_memory_only = topology.shares_all
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
            settle_extremes(receive)


def settle_extremes(values: np.ndarray) -> None:
    """Turn -0 into 0, since they compare equal, so that the order would decide, and NaN into one bit pattern."""
    values += values.dtype.type(0)
    values[np.isnan(values)] = np.nan


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
    slot, rows = memory.slots(send.dtype, len(send))
    slot[...] = send
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


def exact_sum_over_ranks(topology: Topology, rows: np.ndarray, receive: np.ndarray, summands: int) -> None:
    """Write the exact sum of all ranks' ``summands`` rows to ``receive``, of their dtype. The caller holds the lock."""
    exchange = None if topology.size == 1 else _exchange(topology.world, topology.limits)
    rows, out = _reals(rows), _reals(receive)
    for start in range(0, len(out), _BLOCK):
        part = slice(start, start + _BLOCK)
        exact_sum([rows[:, part]], out[part], summands, exchange)


def exact_sum_of_rows(rows: Sequence[np.ndarray], out: np.ndarray) -> None:
    """Write the exact sum of all ranks' flat rows to ``out``, in its dtype, with the bits of `ExactAllReduce`."""
    for start in range(0, len(out), _BLOCK):
        part = slice(start, start + _BLOCK)
        exact_sum([_rows(row[part], out.dtype) for row in rows], _reals(out[part]), len(rows))


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
