"""The end of a rank's data: `join`, and the collectives of ranks that still have some.

A rank in `join` meets the others in a collective of its own. They see that in the agreement by which every collective
begins, and tell it what to take part in. A program without `join` pays nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from mpistrat.collectives import structures
from mpistrat.integrations.hvd import job
from mpistrat.integrations.hvd.examples import example
from mpistrat.integrations.hvd.process_sets import ProcessSet
from mpistrat.runtime.agreement.operation import MismatchError, operation
from mpistrat.runtime.topology import Topology

_JOIN = operation("join")
_Result = TypeVar("_Result")

# What ranks that have joined do in the place of a collective: a function that makes it without data, and its arguments.
Substitute = tuple[Callable[..., object], tuple[Any, ...]]


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
        if _told(topology, others[0], substitute) is None:
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
                "join works in jobs without further process sets: remove these first, or give all ranks equally many "
                "steps"
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
        told = _told(topology, others[0], None)
        if told is not None:
            make, arguments = told
            make(*arguments)
        rounds += 1
    waited = topology.all_gather_object(rounds)
    return max(rank for rank, each in enumerate(waited) if each == min(waited))


def _sides(error: MismatchError) -> tuple[list[int], list[int]]:
    """Return the ranks that are in `join` and those that are not."""
    joined = [rank for rank, each in enumerate(error.said) if each.name == _JOIN.name]
    return joined, [rank for rank in range(len(error.said)) if rank not in joined]


def _told(topology: Topology, root: int, substitute: Substitute | None) -> Any:
    return topology.broadcast_object(substitute, root, "join")
