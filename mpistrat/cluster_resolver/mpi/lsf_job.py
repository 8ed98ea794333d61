"""The facts that LSF gives about a job: its nodes and slots, ``LSB_MCPU_HOSTS="a 4 b 4"``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mpistrat.cluster_resolver.layout import Allocation, from_lines
from mpistrat.launch.hostlist import parsed
from mpistrat.launch.launchers import JSRUN

JOB = "LSB_JOBID"
HOSTS = "LSB_MCPU_HOSTS"


def job(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the name of the job and the variables it was read from, or None outside of LSF."""
    name, index = environ.get(JOB), environ.get("LSB_JOBINDEX", "0")
    if not name:
        return None
    return (name, JOB) if index in ("", "0") else (f"{name}[{index}]", f"{JOB}, LSB_JOBINDEX")


def allocations(environ: Mapping[str, str]) -> list[Allocation]:
    """Return the nodes of the job; under jsrun without the launch node, which is first and has no rank."""
    found = _allocation(environ)
    if found is None:
        return []
    slots = found.slots or ()
    if environ.get(JSRUN.rank[0]) and len(slots) > 1 and slots[0] == 1 and min(slots[1:]) > 1:
        found = Allocation(found.nodes[1:], found.variable, slots[1:])
    return [found]


def _allocation(environ: Mapping[str, str]) -> Allocation | None:
    pairs = parsed(environ, HOSTS, _hosts_and_slots)
    if pairs:
        return Allocation(tuple(pairs), HOSTS, tuple(pairs.values()))
    try:
        lines = Path(environ.get("LSB_DJOB_HOSTFILE", "")).read_text().split()
    except (OSError, ValueError):  # not set, not on this node, or not text
        return from_lines(environ.get("LSB_HOSTS", "").split(), "LSB_HOSTS")
    return from_lines(lines, "LSB_DJOB_HOSTFILE")


def _hosts_and_slots(text: str) -> dict[str, int]:
    words = text.split()
    if len(words) % 2 or not all(map(str.isdecimal, words[1::2])):
        raise ValueError(f"{text!r} is not a list of hosts and their slots such as 'a 4 b 4'")
    found: dict[str, int] = {}
    for host, slots in zip(words[::2], words[1::2], strict=True):
        found[host] = found.get(host, 0) + int(slots)
    return found
