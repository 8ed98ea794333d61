"""Reductions of arrays on the host, by Horovod's rules for scales and integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import arrays
from mpistrat.collectives import CommunicationOptions, reduce_scatter, structures
from mpistrat.collectives.arithmetic import dtypes
from mpistrat.collectives.arithmetic.division import divide
from mpistrat.integrations.hvd import adasum, job
from mpistrat.integrations.hvd.joining import Substitute, collective, refusals
from mpistrat.integrations.hvd.process_sets import ProcessSet
from mpistrat.integrations.hvd.reduce_ops import OWN, Adasum, Average, Op, Sum

_OPTIONS = CommunicationOptions()


def named(name: str | None) -> str | None:
    """Return what the ranks compare of the name that a program gives a collective."""
    return None if name is None else f"named {name}"


def _compared(
    name: str | None, op: Op, sent: Sequence[np.ndarray], prescale_factor: float, postscale_factor: float
) -> str | None:
    """Return what the ranks compare beside the reduction that they make, and the shapes and dtypes."""
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
        hosts = [arrays.to_host(each) for each in values]
        if op is Adasum:
            adasum.check(topology, hosts)
        sent = [_to_send(each, op, prescale_factor) for each in hosts]
        form = _compared(name, op, sent, prescale_factor, postscale_factor)
    described = [(each.dtype, each.shape) for each in sent]
    substitute: Substitute | None = (_without_data, (op, described, form)) if op in _NEUTRAL else None
    totals = collective(process_set, "allreduce", lambda: _reduce(process_set, op, sent, form), substitute)
    return [
        np.asarray(_scaled(_divided(total, op, sent, topology.size), postscale_factor), host.dtype)
        for total, host in zip(totals, hosts, strict=True)
    ]


_NEUTRAL = (Sum, Average, Adasum)  # reductions in which zeros of a rank that has joined change no sum


def _reduce(process_set: ProcessSet, op: Op, sent: list[np.ndarray], form: str | None) -> list[np.ndarray]:
    if op is Adasum:
        return adasum.adasum(process_set.topology, sent, form)
    return process_set.ops.all_reduce(_own(op, sent), sent, _OPTIONS, form)


def _own(op: Op, sent: Sequence[np.ndarray]) -> Any:
    """Return the reduction that the ranks make."""
    return OWN[Sum if _divides_after(op, sent) else op]


def _divides_after(op: Op, sent: Sequence[np.ndarray]) -> bool:
    """Return whether a mean is a sum that is divided after it: there are integers, whose mean is an integer, too."""
    return op is Average and any(each.dtype.kind in "iu" for each in sent)


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
    dtypes.accumulator(host.dtype, OWN.get(op, OWN[Sum]))
    small = host.dtype.kind in "iu" and host.dtype.itemsize < 8
    return _scaled(host.astype(np.int64) if op is Average and small else host, factor)


def _divided(total: np.ndarray, op: Op, sent: Sequence[np.ndarray], size: int) -> np.ndarray:
    """Return what is still to be divided, integers cut to an integer; other results as they are."""
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
    wide = np.float64 if host.dtype.kind in "iu" else dtypes.accumulator(host.dtype, OWN[Sum])
    with np.errstate(all="ignore"):  # overflow gives infinity, as in a sum
        return (host.astype(wide, copy=False) * np.dtype(wide).type(factor)).astype(host.dtype)
