"""Horovod's reductions of arrays of any library. Results have no history of gradients."""

from __future__ import annotations

import enum
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import arrays
from mpistrat.arrays.arrays import as_bytes
from mpistrat.collectives import CommunicationOptions, operations, reduce_scatter, structures
from mpistrat.collectives.movement.moves import exchange
from mpistrat.collectives.operations import FurtherOp, divide
from mpistrat.collectives.operations import Op as OwnOp
from mpistrat.integrations.hvd import job
from mpistrat.integrations.hvd.handles import Substitute, collective, in_place, one_by_one, refusals, with_handle
from mpistrat.integrations.hvd.job import ProcessSet, example, global_process_set
from mpistrat.process.own_files import level_of_program
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.topology import Topology
from mpistrat.values import ReduceOp

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Op",
    "Product",
    "Sum",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]


class Op(enum.Enum):
    """How the values of all ranks are combined. The module has each of them by its name.

    Attributes
    ----------
    Average, Sum, Min, Max, Product
        The reductions.
    Adasum
        A sum that adds parallel vectors as their mean and orthogonal ones as they are.

    Examples
    --------
    >>> import mpistrat.integrations.hvd as hvd
    >>> hvd.Average
    <Op.Average: 'Average'>
    """

    Average = "Average"
    Sum = "Sum"
    Min = "Min"
    Max = "Max"
    Product = "Product"
    Adasum = "Adasum"


Average, Sum, Min, Max, Product, Adasum = Op


OWN: dict[Op, OwnOp] = {
    Sum: ReduceOp.SUM,
    Average: ReduceOp.MEAN,
    Min: FurtherOp.MIN,
    Max: FurtherOp.MAX,
    Product: FurtherOp.PROD,
}


def op_of(op: Op | None, average: bool | None) -> Op:
    """Return the reduction that a call asks for, by default Average. ``average`` is a former argument.

    Raise ValueError if both are given, and TypeError if ``op`` is not one of the reductions.
    """
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn("`average` has been replaced by `op`", DeprecationWarning, stacklevel=level_of_program())
        return Average if average else Sum
    if op is None:
        return Average
    if not isinstance(op, Op):
        raise TypeError(f"op must be one of {', '.join(member.name for member in Op)} of this module, not {op!r}")
    return op


_OPTIONS = CommunicationOptions()
_SMALLEST = np.sqrt(sys.float_info.min)


def named(name: str | None) -> str | None:
    """Return the checked form of a collective's name."""
    return None if name is None else f"named {name}"


def _compared(
    name: str | None, op: Op, sent: Sequence[np.ndarray], prescale_factor: float, postscale_factor: float
) -> str | None:
    """Return the text that the ranks compare, in addition to the reduction, shapes and dtypes."""
    parts = [] if name is None else [f"named {name}"]
    if _divides_after(op, sent):
        parts.append("averages of integers")
    scales = float(prescale_factor), float(postscale_factor)
    if scales != (1.0, 1.0):
        parts.append("scaled by {} before and {} after".format(*scales))
    return ", ".join(parts) or None


def all_reduced(
    values: Sequence[Any],
    name: str | None,
    op: Op,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> list[np.ndarray]:
    """Return the combinations of arrays of any library over the ranks of a set, as NumPy arrays."""
    topology = process_set.topology
    with refusals("allreduce", process_set):
        hosts = [arrays.to_host(value) for value in values]
        if op is Adasum:
            check_adasum(topology, hosts)
        sent = [_to_send(host, op, prescale_factor) for host in hosts]
        form = _compared(name, op, sent, prescale_factor, postscale_factor)
    described = [(array.dtype, array.shape) for array in sent]
    substitute: Substitute | None = (_without_data, (op, described, form)) if op in _NEUTRAL else None
    totals = collective(process_set, "allreduce", lambda: _reduce(process_set, op, sent, form), substitute)
    return [
        np.asarray(_scaled(_divided(total, op, sent, topology.size), postscale_factor), host.dtype)
        for total, host in zip(totals, hosts, strict=True)
    ]


_NEUTRAL = (Sum, Average, Adasum)  # reductions in which zeros of a rank that has joined change no sum


def _reduce(process_set: ProcessSet, op: Op, sent: list[np.ndarray], form: str | None) -> list[np.ndarray]:
    if op is Adasum:
        return adasum(process_set.topology, sent, form)
    return process_set.ops.all_reduce(_own(op, sent), sent, _OPTIONS, form)


def _own(op: Op, sent: Sequence[np.ndarray]) -> Any:
    """Return the reduction that the ranks make."""
    return OWN[Sum if _divides_after(op, sent) else op]


def _divides_after(op: Op, sent: Sequence[np.ndarray]) -> bool:
    """Return whether a mean is computed as a sum and a division: the mean of integers is an integer, too."""
    return op is Average and any(array.dtype.kind in "iu" for array in sent)


def _without_data(op: Op, described: Sequence[tuple[np.dtype, tuple[int, ...]]], form: str | None) -> None:
    """Take part in an all-reduce, on a rank that has joined."""
    _reduce(job.global_process_set, op, [np.zeros(shape, dtype) for dtype, shape in described], form)


def reduce_scattered(
    value: Any, name: str | None, op: Op, prescale_factor: float, postscale_factor: float, process_set: ProcessSet
) -> np.ndarray:
    """Return this rank's rows of the combination of arrays of any library, as a NumPy array."""
    topology = process_set.topology
    with refusals("reducescatter", process_set):
        if op is Adasum:
            raise NotImplementedError("reducescatter by Adasum is not provided: use allreduce, or op=Average")
        host = arrays.to_host(value)
        sent = _to_send(host, op, prescale_factor)
        reduce_scatter.rows_of_ranks(host, 1)
        form = _compared(name, op, [sent], prescale_factor, postscale_factor)

    def make() -> np.ndarray:
        if form is not None:
            structures.agree(topology, "reducescatter", form)
        return reduce_scatter.reduce_scatter(topology, _own(op, [sent]), sent)

    total = _divided(collective(process_set, "reducescatter", make), op, [sent], topology.size)
    return _scaled(total, postscale_factor).astype(host.dtype, copy=False)


def _to_send(host: np.ndarray, op: Op, factor: float) -> np.ndarray:
    """Return an array, scaled, in a dtype in which the sum for a mean of small integers does not overflow.

    Raise TypeError if values of this dtype cannot be combined.
    """
    operations.accumulator(host.dtype, OWN.get(op, OWN[Sum]))
    small = host.dtype.kind in "iu" and host.dtype.itemsize < 8
    return _scaled(host.astype(np.int64) if op is Average and small else host, factor)


def _divided(total: np.ndarray, op: Op, sent: Sequence[np.ndarray], size: int) -> np.ndarray:
    """Return a sum divided for its mean, integers cut to an integer; other results as they are."""
    if not _divides_after(op, sent):
        return total
    if total.dtype.kind not in "iu":
        return divide(total, size)
    ranks = total.dtype.type(size)  # a Python int makes float64 of a uint64 scalar in NumPy 1
    return (total - np.fmod(total, ranks)) // ranks


def _scaled(host: np.ndarray, factor: float) -> np.ndarray:
    """Return an array multiplied by a factor: integers in float64, half precision in float32."""
    if factor == 1.0:
        return host
    wide = np.float64 if host.dtype.kind in "iu" else operations.accumulator(host.dtype, OWN[Sum])
    with np.errstate(all="ignore"):  # overflow gives infinity, as in a sum
        return (host.astype(wide, copy=False) * np.dtype(wide).type(factor)).astype(host.dtype)


def check_adasum(topology: Topology, values: Sequence[np.ndarray]) -> None:
    """Raise NotImplementedError unless the ranks are a power of two, TypeError if an array is not floating point."""
    if topology.size & (topology.size - 1):
        raise NotImplementedError(
            f"Adasum of {topology.size} ranks: their number must be a power of two; use op=Average"
        )
    for value in values:
        if not operations.has_mean(value.dtype) or value.dtype.kind == "c":
            raise TypeError(f"Adasum of {value.dtype} is not defined: cast to a floating point dtype")


def adasum(topology: Topology, values: Sequence[np.ndarray], form: str | None) -> list[np.ndarray]:
    """Return the combinations of arrays over all ranks, each array by itself. Collective.

    Parallel vectors count as their mean, and orthogonal ones in full: Maleki et al. 2020, "Scaling Distributed Training
    with Adaptive Summation", arXiv:2006.02924.

    In step ``i`` ranks whose numbers differ in bit ``i`` exchange their vectors, and both compute the same. Values of
    half precision are combined in float32. Raise MismatchError on every rank if shapes or dtypes differ between ranks.
    """
    rank, size = topology.rank, topology.size
    reduction = operation("all_reduce", "Adasum", tuple((value.dtype, value.shape) for value in values), form)
    totals = [value.astype(operations.accumulator(value.dtype, ReduceOp.SUM)).reshape(-1) for value in values]
    with topology.lock.collective(reduction):
        level = 1
        while level < size:
            partner = rank ^ level
            received = [np.empty_like(total) for total in totals]
            for own, theirs in zip(totals, received, strict=True):
                sends: list[np.ndarray | None] = [None] * size
                receives: list[np.ndarray | None] = [None] * size
                sends[partner], receives[partner] = as_bytes(own), as_bytes(theirs)
                exchange(topology, sends, receives)
            # Both partners combine in the order of ranks, and get the same bits.
            pairs = zip(totals, received, strict=True) if rank < partner else zip(received, totals, strict=True)
            totals = [adasum_of_two(*pair) for pair in pairs]
            level *= 2
    return [
        total.astype(value.dtype, copy=False).reshape(value.shape) for total, value in zip(totals, values, strict=True)
    ]


def adasum_of_two(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the adaptive sum of two vectors.

    >>> x, y = np.array([2.0, 0.0]), np.array([0.0, 3.0])
    >>> adasum_of_two(x, x), adasum_of_two(x, y)
    (array([2., 0.]), array([2., 3.]))
    """
    wide_a, wide_b = a.astype(np.float64, copy=False), b.astype(np.float64, copy=False)
    dot, of_a, of_b = wide_a @ wide_b, wide_a @ wide_a, wide_b @ wide_b
    weight_a = 1 - dot / of_a / 2 if of_a >= _SMALLEST else 1.0
    weight_b = 1 - dot / of_b / 2 if of_b >= _SMALLEST else 1.0
    return a.dtype.type(weight_a) * a + b.dtype.type(weight_b) * b


@example("hvd.allreduce(np.array([1.0, 3.0]), op=hvd.Average)", "array([1., 3.])")
def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the combination of the arrays of all ranks. Collective.

    Parameters
    ----------
    tensor : array or number
        Shape and dtype must be equal on all ranks.
    average : bool, optional
        Former way to choose between Average and Sum.
    name : str, optional
        The ranks compare it.
    op : Op, optional
        By default Average. The average of integers is cut to an integer.
    prescale_factor, postscale_factor : float
        Factors of the values and of the result.
    process_set : ProcessSet

    Returns
    -------
    array or number

    Raises
    ------
    MismatchError
        On every rank, if names, ops, shapes or dtypes differ between ranks.
    TypeError
        If the values cannot be combined.
    """
    args = name, op_of(op, average), prescale_factor, postscale_factor, process_set
    return arrays.from_host(all_reduced([tensor], *args)[0], tensor)


@example("hvd.grouped_allreduce([np.ones(2), np.zeros(1)])", "[array([1., 1.]), array([0.])]")
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the combinations of several arrays, in as few messages as possible. Collective."""
    args = name, op_of(op, average), prescale_factor, postscale_factor, process_set
    totals = all_reduced(tensors, *args)
    return [arrays.from_host(*pair) for pair in zip(totals, tensors, strict=True)]


@example("len(hvd.reducescatter(np.ones(hvd.size())))", "1")
def reducescatter(
    tensor: Any,
    name: str | None = None,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Return this rank's rows of the combination of the arrays of all ranks. Collective.

    Of ``n`` rows every rank gets ``n // size``, and the first ``n % size`` ranks get one more.
    """
    args = name, op_of(op, None), prescale_factor, postscale_factor, process_set
    return arrays.from_host(reduce_scattered(tensor, *args), tensor)


allreduce_, grouped_allreduce_ = in_place(allreduce), in_place(grouped_allreduce)
grouped_reducescatter = one_by_one(reducescatter)
allreduce_async, allreduce_async_ = with_handle(allreduce), with_handle(allreduce_)
grouped_allreduce_async = with_handle(grouped_allreduce)
grouped_allreduce_async_ = with_handle(grouped_allreduce_)
reducescatter_async, grouped_reducescatter_async = (with_handle(reducescatter), with_handle(grouped_reducescatter))
