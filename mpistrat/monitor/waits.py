"""Which ranks wait, in which collective, for which ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mpistrat.record.read import Entry, Membership, Record
from mpistrat.representation import grouped

_T = TypeVar("_T")


@dataclass(frozen=True)
class Wait:
    """A collective in which some ranks of a communicator wait for others."""

    # the random number and the size of the communicator
    token: int
    size: int
    entry: Entry  # the collective, as the rank that waits longest has noted it
    # the ranks in it, and those that are not: a rank whose process is stopped or gone is missing
    waiting: tuple[Record, ...]
    missing: tuple[Record, ...]
    unseen: tuple[int, ...]  # ranks of the communicator without a record on this node
    last_entered: float  # when the last of the waiting ranks has entered it

    def goes_on(self, now: float) -> bool:
        """Return whether all ranks are in it, and the last one came so late that the call may not be stuck."""
        return not self.missing and not self.unseen and now - self.last_entered < (now - self.entry.entered) / 2


def waits(records: Sequence[Record], halted: Collection[str]) -> list[Wait]:
    """Return the collectives in which ranks of one job wait, the oldest first.

    In a communicator of all ranks, ranks that have not joined it yet are missing, too. ``halted`` has the keys of the
    records of processes that are stopped or gone.
    """
    communicators = grouped((it.token, (record, it)) for record in records for it in record.memberships)
    result = []
    for token, members in communicators.items():
        size = members[0][1].size
        late = _late(records, members, size)
        inside = grouped(
            (membership.last.number, (membership.last, record))
            for record, membership in members
            if membership.last is not None and not membership.last.left and record.key not in halted and size > 1
        )
        seen = {record.rank for _, record in members} | {record.rank for record in late}
        unseen = tuple(sorted(set(range(size)) - seen))
        for number, ranks in inside.items():
            waiting = [record for _, record in ranks]
            ahead = [  # ranks that have left this call for a later one in which they are
                record for later, others in inside.items() if later > number for _, record in others
            ]
            missing = [record for record, _ in members if record not in waiting and record not in ahead] + late
            entry = min((entry for entry, _ in ranks), key=lambda entry: entry.entered)
            last = max(entry.entered for entry, _ in ranks)
            result.append(Wait(token, size, entry, tuple(waiting), tuple(missing), unseen, last))
    return sorted(result, key=lambda wait: wait.entry.entered)


def _late(records: Sequence[Record], members: Sequence[tuple[Record, Membership]], size: int) -> list[Record]:
    """Return the ranks that have not joined a communicator, if it has all ranks of the job in their order."""
    joined = {record.rank for record, _ in members}
    if any((record.rank, record.size) != (membership.rank, size) for record, membership in members):
        return []
    return [record for record in records if record.size == size and record.rank not in joined]


def in_jobs(items: Iterable[_T], tokens_of: Callable[[_T], Iterable[int]]) -> list[list[_T]]:
    """Return items in groups that share the token of a communicator, directly or through others.

    >>> in_jobs([(1,), (2, 3), (4,), (3, 1)], set)
    [[(4,)], [(1,), (2, 3), (3, 1)]]
    """
    jobs: list[tuple[set[int], list[_T]]] = []
    for item in items:
        tokens = set(tokens_of(item))
        near = [job for job in jobs if job[0] & tokens]
        jobs = [job for job in jobs if not job[0] & tokens]
        jobs.append((tokens.union(*(of for of, _ in near)), [*(one for _, job in near for one in job), item]))
    return [job for _, job in jobs]


def tokens_of(record: Record) -> set[int]:
    """Return the tokens of the communicators of a record."""
    return {membership.token for membership in record.memberships}


def jobs_of(records: Iterable[Record]) -> list[list[Record]]:
    """Return records by job, each job in the order of ranks."""
    return [sorted(job, key=lambda record: (record.rank, record.pid)) for job in in_jobs(records, tokens_of)]


def of_one_job(record: Record, records: Iterable[Record]) -> list[Record]:
    """Return the job of a record, which is one of ``records``."""
    return next(job for job in jobs_of(records) if record in job)


def wait_of(record: Record, job_waits: Sequence[Wait]) -> Wait | None:
    """Return the wait that a rank is in, or None."""
    return next((wait for wait in job_waits if record in wait.waiting), None)


def ends_in_itself(record: Record, job_waits: Sequence[Wait]) -> bool:
    """Return whether a rank that waits is waited for by a rank that it waits for."""
    own = wait_of(record, job_waits)
    if own is None:
        return False
    seen: set[str] = set()
    pending = list(own.missing)
    while pending:
        other = pending.pop()
        if other == record:
            return True
        if other.key in seen:
            continue
        seen.add(other.key)
        following = wait_of(other, job_waits)
        if following is not None:
            pending += following.missing
    return False
