"""The forms of a collective: asynchronous, in place, for several arrays, and without ranks that have joined.

Every collective is complete when its call returns, and so is its handle.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from mpistrat.arrays import arrays
from mpistrat.collectives import structures
from mpistrat.integrations.hvd import job
from mpistrat.integrations.hvd.job import ProcessSet, example
from mpistrat.runtime.agreement.operation import MismatchError, operation
from mpistrat.runtime.topology import Topology

__all__ = ["join", "poll", "synchronize"]

_P = ParamSpec("_P")
# A rank in `join` begins a collective of its own. The other ranks see it in the agreement with which every collective
# begins, and send the joined rank a substitute for theirs. A program without `join` pays nothing for it.
_JOIN = operation("join")
_Result = TypeVar("_Result")

# The call of ranks that have joined in place of a collective: a function that makes it without data, and its arguments.
Substitute = tuple[Callable[..., object], tuple[Any, ...]]


class Handle:
    """The handle of an asynchronous call. ``output`` is its result."""

    __slots__ = ("output",)

    def __init__(self, output: Any):
        self.output = output


def with_handle(call: Callable[_P, Any]) -> Callable[_P, Handle]:
    """Return the form of a collective with ``_async`` in its name, which returns a handle."""

    @wraps(call)
    def begin(*args: _P.args, **kwargs: _P.kwargs) -> Handle:
        return Handle(call(*args, **kwargs))

    stem = call.__name__.rstrip("_")
    begin.__name__ = begin.__qualname__ = f"{stem}_async{call.__name__[len(stem) :]}"
    begin.__doc__ = f"Make the collective `{call.__name__}`, and return a handle for `synchronize`."
    return example("float(hvd.synchronize(hvd.allreduce_async(2.0)))", "2.0")(begin)


def copy_into(target: Any, result: Any) -> Any:
    """Write a result into an array that can be written to, of NumPy or PyTorch, and return that.

    Raise TypeError if the arrays of the library do not change.
    """
    if hasattr(target, "copy_"):
        target.detach().copy_(arrays.from_host(result, target) if isinstance(result, np.ndarray) else result)
    elif isinstance(target, np.ndarray):
        np.copyto(target, result)
    else:
        raise TypeError(
            f"an array of {type(target).__name__} cannot be changed in place: use the call without an underscore at "
            "the end of its name"
        )
    return target


def in_place(call: Callable[_P, Any]) -> Callable[_P, Any]:
    """Return the form of a collective with an underscore at its end, which overwrites its first argument."""
    first = next(iter(inspect.signature(call).parameters))

    @wraps(call)
    def overwrite(*args: _P.args, **kwargs: _P.kwargs) -> Any:
        target: Any = args[0] if args else kwargs[first]
        result = call(*args, **kwargs)
        if isinstance(result, list):
            return [copy_into(*pair) for pair in zip(target, result, strict=True)]
        return copy_into(target, result)

    overwrite.__name__ = overwrite.__qualname__ = f"{call.__name__}_"
    overwrite.__doc__ = f"""Make the collective `{call.__name__}`, write the result into its argument, and return that.

    Raises
    ------
    TypeError
        If arrays of its library cannot be changed.

    Examples
    --------
    >>> import numpy as np, mpistrat.integrations.hvd as hvd
    >>> hvd.init()
    >>> total = np.ones(2)
    >>> hvd.allreduce_(total) is total
    True
    """
    return overwrite


def one_by_one(call: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Return the form of a collective with ``grouped_`` before its name, which takes several arrays."""

    @wraps(call)
    def grouped(tensors: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
        return [call(tensor, *args, **kwargs) for tensor in tensors]

    first, *others = inspect.signature(call).parameters.values()
    grouped.__signature__ = inspect.Signature([first.replace(name="tensors"), *others])  # type: ignore[attr-defined]
    grouped.__name__ = grouped.__qualname__ = f"grouped_{call.__name__}"
    grouped.__doc__ = f"Make the collective `{call.__name__}` for several arrays, one after the other. Return a list."
    return example("len(hvd.grouped_allgather([np.ones(2), np.zeros(3)]))", "2")(grouped)


@example("hvd.poll(hvd.allreduce_async(1.0))", "True")
def poll(handle: Handle) -> bool:
    """Return True: a collective is complete when its call returns."""
    synchronize(handle)
    return True


@example("float(hvd.synchronize(hvd.allreduce_async(3.0, op=hvd.Max)))", "3.0")
def synchronize(handle: Handle) -> Any:
    """Return the result of an asynchronous call."""
    if not isinstance(handle, Handle):
        raise TypeError(f"expected what an asynchronous call returned, not {handle!r}")
    return handle.output


def collective(
    process_set: ProcessSet, name: str, make: Callable[[], _Result], substitute: Substitute | None = None
) -> _Result:
    """Return ``make()``, a collective, in which ranks that have joined make ``substitute``.

    Raise RuntimeError if a rank has joined and the call has no substitute. Raise MismatchError on every rank if the
    ranks disagree for another reason.
    """
    try:
        return make()
    except MismatchError as error:
        joined, others = _sides(error)
        if not joined or not others:
            raise
        topology = process_set.topology
        if _root_substitute(topology, others[0], substitute) is None:
            raise RuntimeError(
                f"rank {topology.rank}: {name} needs all ranks, and {joined} have joined: only allreduce by Sum, "
                "Average or Adasum goes on without them"
            ) from None
    return make()


@contextmanager
def refusals(name: str, process_set: ProcessSet) -> Iterator[None]:
    """Context as `structures.refusals`, also while ranks have joined.

    Raise MismatchError on every rank if only some of the ranks have an error in their arguments.
    """
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        wrong = error  # the name of an `except` clause ends with it
        collective(process_set, name, lambda: structures.refuse(name, process_set.topology, wrong))
        raise


@example("hvd.join() == hvd.size() - 1", "True")
def join(device: int = -1) -> int:
    """Take part in the reductions of other ranks, with zeros, until all ranks have joined. Collective.

    A rank that has no more data calls this. Averages are still divided by the number of all ranks.

    Parameters
    ----------
    device : int
        Not used.

    Returns
    -------
    int
        The rank that joined last.

    Raises
    ------
    NotImplementedError
        If the job has process sets: their ranks could wait for each other without end.
    """
    topology = job.topology()
    with structures.refusals("join", topology):
        if job.further_sets():
            raise NotImplementedError(
                "join works in jobs without further process sets: remove these first, or give all ranks as many steps"
            )
    rounds = 0
    while True:
        try:
            topology.lock.compare(_JOIN)
            break
        except MismatchError as error:
            joined, others = _sides(error)
            if not joined or not others:  # the ranks are not in step
                raise
        substitute = _root_substitute(topology, others[0], None)
        if substitute is not None:
            make, arguments = substitute
            make(*arguments)
        rounds += 1
    waited = topology.all_gather_object(rounds)  # the rank that joined last has substituted in the fewest rounds
    return max(rank for rank, count in enumerate(waited) if count == min(waited))


def _sides(error: MismatchError) -> tuple[list[int], list[int]]:
    """Return the ranks that are in `join` and those that are not."""
    joined = [rank for rank, report in enumerate(error.reports) if report.name == _JOIN.name]
    return joined, [rank for rank in range(len(error.reports)) if rank not in joined]


def _root_substitute(topology: Topology, root: int, substitute: Substitute | None) -> Any:
    return topology.broadcast_object(substitute, root, "join")
