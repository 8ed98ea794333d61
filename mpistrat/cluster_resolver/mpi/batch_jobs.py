"""The facts that PBS and LSF give about a job: its name and its nodes.

PBS has a file with one line for each expected rank, and LSF the nodes and their slots, ``LSB_MCPU_HOSTS="a 4 b 4"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mpistrat.cluster_resolver.layout import Allocation, from_lines
from mpistrat.launch.hostlist import parsed
from mpistrat.launch.launchers import JSRUN

LSF_JOB, _LSF_HOSTS = "LSB_JOBID", "LSB_MCPU_HOSTS"
_PBS_JOB, _PBS_NODEFILE = "PBS_JOBID", "PBS_NODEFILE"


def pbs_job(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the name of the job and the variable it was read from, or None outside of PBS."""
    return (environ[_PBS_JOB], _PBS_JOB) if environ.get(_PBS_JOB) else None


def pbs_allocations(environ: Mapping[str, str]) -> list[Allocation]:
    """Return the nodes of the job, or an empty list if the file cannot be read.

    Some sites have the file on the first node only.
    """
    found = from_lines(_words_of_file(environ, _PBS_NODEFILE), _PBS_NODEFILE)
    return [found] if found else []


def lsf_job(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the name of the job and the variables it was read from, or None outside of LSF."""
    name, index = environ.get(LSF_JOB), environ.get("LSB_JOBINDEX", "0")
    if not name:
        return None
    return (name, LSF_JOB) if index in ("", "0") else (f"{name}[{index}]", f"{LSF_JOB}, LSB_JOBINDEX")


def lsf_allocations(environ: Mapping[str, str]) -> list[Allocation]:
    """Return the nodes of the job; under jsrun without the launch node, which is first and has no rank."""
    found = _lsf_allocation(environ)
    if found is None:
        return []
    slots = found.slots or ()
    if environ.get(JSRUN.rank[0]) and len(slots) > 1 and slots[0] == 1 and min(slots[1:]) > 1:
        found = Allocation(found.nodes[1:], found.variable, slots[1:])
    return [found]


def _lsf_allocation(environ: Mapping[str, str]) -> Allocation | None:
    pairs = parsed(environ, _LSF_HOSTS, _hosts_and_slots)
    if pairs:
        return Allocation(tuple(pairs), _LSF_HOSTS, tuple(pairs.values()))
    found = from_lines(_words_of_file(environ, "LSB_DJOB_HOSTFILE"), "LSB_DJOB_HOSTFILE")
    return found or from_lines(environ.get("LSB_HOSTS", "").split(), "LSB_HOSTS")


def _words_of_file(environ: Mapping[str, str], name: str) -> list[str]:
    try:
        return Path(environ.get(name, "")).read_text().split()
    except (OSError, ValueError):  # not set, not on this node, or not text
        return []


def _hosts_and_slots(text: str) -> dict[str, int]:
    words = text.split()
    if len(words) % 2 or not all(map(str.isdecimal, words[1::2])):
        raise ValueError(f"{text!r} is not a list of hosts and their slots such as 'a 4 b 4'")
    found: dict[str, int] = {}
    for host, slots in zip(words[::2], words[1::2], strict=True):
        found[host] = found.get(host, 0) + int(slots)
    return found
