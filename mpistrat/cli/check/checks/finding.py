"""The types of a check: its input and its findings."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mpistrat.cli.check.checks.talk import Talk


START = "the start of MPI"  # a stage of the checks


class Severity(enum.Enum):
    """The severity of a finding."""

    OK = "ok"
    LOOK = "look"
    FIX = "fix"
    UNKNOWN = "not checked"


class Finding(NamedTuple):
    """A result of a check: what was found, how severe it is, and what to do about it."""

    found: str
    severity: Severity
    advice: str = ""


@dataclass(frozen=True)
class CheckOptions:
    """The options of `mpistrat check`. A rank without progress for ``limit`` seconds is reported."""

    data: str | None = None
    limit: float = 60.0


class Blame(enum.IntEnum):
    """The kinds of trouble of a rank: probable causes first, waiting for other ranks last."""

    UNHEARD = enum.auto()
    ENDED = enum.auto()
    ALONE = enum.auto()
    LIBRARY = enum.auto()
    SILENCE = enum.auto()
    FAILED = enum.auto()
    STANDS = enum.auto()
    STOOD = enum.auto()


class Trouble(NamedTuple):
    """The trouble that stopped the checks of a rank. It has plain values only: it is sent as JSON.

    ``blame`` is a `Blame`, and ``stage`` the stage of the checks at that time, or empty.
    """

    blame: int
    text: str
    stage: str = ""


@dataclass
class CheckedJob:
    """The facts of a job of ``size`` ranks. It has plain values only: they are sent as JSON.

    ``facts`` has for each rank its own: ``host``, ``node`` (its number), and the facts of each check by name.
    ``talked`` has by name of a check the facts from messages between ranks. It is empty if the ranks could not
    communicate. ``troubles`` has by rank what stopped its checks. ``alone`` says that each rank is a job of its own;
    None if the ranks are one job.
    """

    size: int
    facts: dict[int, dict[str, Any]]
    talked: dict[str, Any] = field(default_factory=dict)
    troubles: dict[int, Trouble] = field(default_factory=dict)
    alone: Finding | None = None
    options: CheckOptions = field(default_factory=CheckOptions)

    def of(self, check: str) -> dict[int, Any]:
        """Return the facts of a check by rank."""
        return {rank: facts[check] for rank, facts in sorted(self.facts.items()) if facts.get(check) is not None}

    def nodes(self) -> dict[str, list[int]]:
        """Return the ranks of each node by its name. Nodes of the same name get a number."""
        by_node: dict[Any, list[int]] = {}
        for rank, facts in sorted(self.facts.items()):
            by_node.setdefault(facts.get("node", facts["host"]), []).append(rank)
        hosts = [self.facts[ranks[0]]["host"] for ranks in by_node.values()]
        return {
            host if hosts.count(host) == 1 else f"{host} (node {node})": ranks
            for host, (node, ranks) in zip(hosts, by_node.items(), strict=True)
        }


class Check(NamedTuple):
    """One check, with the name of its facts, and its title in the table.

    ``local`` returns the facts that a rank finds by itself, before MPI is started, and ``talk`` those from messages
    between ranks. The result of rank 0 counts.
    """

    name: str
    title: str
    judge: Callable[[CheckedJob], Finding]
    local: Callable[[CheckOptions], Any] | None = None
    talk: Callable[[Talk, CheckOptions], Any] | None = None


def size(count: float) -> str:
    """Return a number of bytes as text.

    >>> size(64 * 2**20), size(3 * 2**30)
    ('64 MiB', '3.0 GiB')
    """
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
