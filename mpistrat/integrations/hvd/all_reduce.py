"""Horovod's all-reduces and reduce-scatters of arrays of any library. Results have no history of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpistrat.arrays import arrays
from mpistrat.integrations.hvd.examples import example
from mpistrat.integrations.hvd.handles import in_place, one_by_one, with_handle
from mpistrat.integrations.hvd.job import global_process_set
from mpistrat.integrations.hvd.process_sets import ProcessSet
from mpistrat.integrations.hvd.reduce_ops import Average, Op, op_of
from mpistrat.integrations.hvd.reductions import all_reduced, reduce_scattered


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
    return [arrays.from_host(*each) for each in zip(totals, tensors, strict=True)]


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
