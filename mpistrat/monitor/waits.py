"""Which ranks wait, in which collective, for which ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mpistrat.record.read import Entry, Membership, Record

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

    In a communicator of all ranks, those that have not joined it yet are missing, too. ``halted`` has the keys of the
    records of processes that are stopped or gone.
    """
    communicators: dict[int, list[tuple[Record, Membership]]] = {}
    for record in records:
        for each in record.memberships:
            communicators.setdefault(each.token, []).append((record, each))
    found = []
    for token, members in communicators.items():
        size = members[0][1].size
        late = _late(records, members, size)
        inside: dict[int, list[tuple[Entry, Record]]] = {}
        for record, each in members:
            if each.last is not None and not each.last.left and record.key not in halted and size > 1:
                inside.setdefault(each.last.number, []).append((each.last, record))
        seen = {each.rank for _, each in members} | {each.rank for each in late}
        unseen = tuple(sorted(set(range(size)) - seen))
        for number, ranks in inside.items():
            waiting = [record for _, record in ranks]
            ahead = [  # ranks that have left this call for a later one in which they are
                record for later, others in inside.items() if later > number for _, record in others
            ]
            missing = [record for record, _ in members if record not in waiting and record not in ahead] + late
            entry = min((entry for entry, _ in ranks), key=lambda each: each.entered)
            last = max(entry.entered for entry, _ in ranks)
            found.append(Wait(token, size, entry, tuple(waiting), tuple(missing), unseen, last))
    return sorted(found, key=lambda each: each.entry.entered)


def _late(records: Sequence[Record], members: Sequence[tuple[Record, Membership]], size: int) -> list[Record]:
    """Return the ranks that have not joined a communicator, if it has all ranks of the job in their order."""
    joined = {record.rank for record, _ in members}
    if any((record.rank, record.size) != (each.rank, size) for record, each in members):
        return []
    return [each for each in records if each.size == size and each.rank not in joined]


def in_jobs(items: Iterable[_T], tokens_of: Callable[[_T], Iterable[int]]) -> list[list[_T]]:
    """Return items in groups that share the token of a communicator, directly or through others.

    >>> in_jobs([(1,), (2, 3), (4,), (3, 1)], set)
    [[(4,)], [(1,), (2, 3), (3, 1)]]
    """
    jobs: list[tuple[set[int], list[_T]]] = []
    for each in items:
        tokens = set(tokens_of(each))
        near = [job for job in jobs if job[0] & tokens]
        jobs = [job for job in jobs if not job[0] & tokens]
        jobs.append((tokens.union(*(of for of, _ in near)), [*(one for _, job in near for one in job), each]))
    return [job for _, job in jobs]


def tokens_of(record: Record) -> set[int]:
    """Return the tokens of the communicators of a record."""
    return {each.token for each in record.memberships}


def jobs_of(records: Iterable[Record]) -> list[list[Record]]:
    """Return records by job, those of a job in the order of ranks."""
    return [sorted(job, key=lambda each: (each.rank, each.pid)) for job in in_jobs(records, tokens_of)]


def of_one_job(record: Record, records: Iterable[Record]) -> list[Record]:
    """Return a record, which is one of ``records``, and those of its job."""
    return next(job for job in jobs_of(records) if record in job)


def wait_of(record: Record, found: Sequence[Wait]) -> Wait | None:
    """Return the wait that a rank is in, or None."""
    return next((each for each in found if record in each.waiting), None)


def ends_in_itself(record: Record, found: Sequence[Wait]) -> bool:
    """Return whether a rank that waits is waited for by a rank that it waits for."""
    own = wait_of(record, found)
    if own is None:
        return False
    seen: set[str] = set()
    pending = list(own.missing)
    while pending:
        each = pending.pop()
        if each == record:
            return True
        if each.key in seen:
            continue
        seen.add(each.key)
        following = wait_of(each, found)
        if following is not None:
            pending += following.missing
    return False
