"""The attempts of ranks to make groups. Those at a group of the same ranks are numbered."""

from __future__ import annotations

from typing import NamedTuple


class Attempt(NamedTuple):
    """An attempt of a rank to make a group."""

    ranks: tuple[int, ...]
    call: str  # torch's name of the group: the number of the call, or a hash with use_local_synchronization
    era: int  # the number of default groups that were made before
    number: int  # of this attempt, among those at these ranks in the era

    def matches(self, other: Attempt) -> bool:
        """Return whether another rank makes the same attempt.

        Either number may differ. That of the call does after other ranks have repeated a call without this one, and
        that of the attempt after ranks have given different lists by mistake.
        """
        same_call = self.call == other.call and self.call.isdecimal()
        return (self.ranks, self.era) == (other.ranks, other.era) and (
            same_call or self.number == other.number
        )

    def is_before(self, other: Attempt) -> bool:
        """Return whether this attempt at a group of the same ranks comes before another one."""
        return (self.era, self.number) < (other.era, other.number)


class Attempts:
    """The attempts of this rank."""

    def __init__(self) -> None:
        self._era = 0
        self._last: dict[tuple[int, ...], int] = {}
        self._failed: set[tuple[int, ...]] = set()  # groups whose last attempt failed
        self.repeats = 0  # how many attempts followed one that failed, and have a later number of the call

    def begin_era(self) -> None:
        """Number attempts anew, as torch does with groups when it makes a default group. Called by all ranks."""
        self._era += 1
        self.repeats = 0
        self._last.clear()
        self._failed.clear()

    def begin(self, ranks: tuple[int, ...], call: str) -> Attempt:
        """Return the next attempt at a group."""
        self._last[ranks] = self._last.get(ranks, 0) + 1
        self.repeats += ranks in self._failed and call.isdecimal()
        self._failed.discard(ranks)
        return Attempt(ranks, call, self._era, self._last[ranks])

    def fail(self, attempt: Attempt) -> None:
        """Note that an attempt has failed."""
        self._failed.add(attempt.ranks)

    def count(self, ranks: tuple[int, ...], number: int) -> None:
        """Count the attempts at a group up to a number as made."""
        self._last[ranks] = max(number, self._last.get(ranks, 0))
