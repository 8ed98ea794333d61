"""What a check is, what it is given, and what it finds."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mpistrat.cli.check.checks.talk import Talk


START = "the start of MPI"  # a stage of the checks


class Verdict(enum.Enum):
    """How bad it is."""

    OK = "ok"
    LOOK = "look"
    FIX = "fix"
    UNKNOWN = "not checked"


class Finding(NamedTuple):
    """What a check found.

    Attributes
    ----------
    found : str
    verdict : Verdict
    advice : str
        What to do about it.
    """

    found: str
    verdict: Verdict
    advice: str = ""


@dataclass(frozen=True)
class CheckOptions:
    """What the user asked for.

    Attributes
    ----------
    data : str or None
        The directory of the program's data.
    limit : float
        Seconds that a rank may go without getting anywhere.
    """

    data: str | None = None
    limit: float = 60.0


class Blame(enum.IntEnum):
    """What kept a rank from its end: probable causes first, waiting for other ranks last."""

    UNHEARD = enum.auto()
    ENDED = enum.auto()
    ALONE = enum.auto()
    LIBRARY = enum.auto()
    SILENCE = enum.auto()
    FAILED = enum.auto()
    STANDS = enum.auto()
    STOOD = enum.auto()


class Trouble(NamedTuple):
    """What kept a rank from its end. All of it is plain values, for it travels as JSON.

    Attributes
    ----------
    blame : int
        A `Blame`.
    text : str
    stage : str
        The stage of the checks in which the rank was, or empty.
    """

    blame: int
    text: str
    stage: str = ""


class Alone(NamedTuple):
    """Each rank is a job of its own.

    Attributes
    ----------
    found : str
    advice : str
        What to do about it.
    """

    found: str
    advice: str


@dataclass
class CheckedJob:
    """What is known of a job. All of it is plain values, for it travels as JSON.

    Attributes
    ----------
    size : int
        How many ranks there are.
    facts : dict
        By rank, what each found out alone: ``host``, ``node`` (its number), and by the name of a check its facts.
    talked : dict
        By the name of a check, what the ranks found out together; empty if they could not talk.
    troubles : dict of Trouble
        By rank, what kept it from getting to the end.
    alone : Alone or None
        Why each rank is a job of its own, if that is so.
    options : CheckOptions
    """

    size: int
    facts: dict[int, dict[str, Any]]
    talked: dict[str, Any] = field(default_factory=dict)
    troubles: dict[int, Trouble] = field(default_factory=dict)
    alone: Alone | None = None
    options: CheckOptions = field(default_factory=CheckOptions)

    def of(self, check: str) -> dict[int, Any]:
        """By rank, the facts of a check."""
        return {
            rank: facts[check] for rank, facts in sorted(self.facts.items()) if facts.get(check) is not None
        }

    def nodes(self) -> dict[str, list[int]]:
        """By the name of a node, its ranks. Nodes of one name are told apart by their number."""
        by_node: dict[Any, list[int]] = {}
        for rank, facts in sorted(self.facts.items()):
            by_node.setdefault(facts.get("node", facts["host"]), []).append(rank)
        hosts = [self.facts[ranks[0]]["host"] for ranks in by_node.values()]
        return {
            host if hosts.count(host) == 1 else f"{host} (node {node})": ranks
            for host, (node, ranks) in zip(hosts, by_node.items(), strict=True)
        }


class Check(NamedTuple):
    """One thing to look at.

    Attributes
    ----------
    name : str
        The name of its facts.
    title : str
        What the table calls it.
    judge : callable
        ``judge(job) -> Finding``.
    local : callable or None
        ``local(options) -> facts`` that a rank finds out alone, before MPI is started.
    talk : callable or None
        ``talk(talk, options)``: what the ranks find out together. Rank 0's answer counts.
    """

    name: str
    title: str
    judge: Callable[[CheckedJob], Finding]
    local: Callable[[CheckOptions], Any] | None = None
    talk: Callable[[Talk, CheckOptions], Any] | None = None


def ranks(numbers: Iterable[int]) -> str:
    """Ranks as text.

    Examples
    --------
    >>> ranks([2]), ranks([0, 1, 2, 5])
    ('rank 2', 'ranks 0-2,5')
    """
    from mpistrat.runtime.process.affinity import ranges

    numbers = list(numbers)
    return f"rank{'s' * (len(numbers) > 1)} {ranges(numbers)}"


def size(count: float) -> str:
    """Bytes as text.

    Examples
    --------
    >>> size(64 * 2**20), size(3 * 2**30)
    ('64 MiB', '3.0 GiB')
    """
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
