"""Slurm's lists such as ``node[01-03,07],login`` and ``3,1(x2)``, and whether a step is the one of this process.

The grammar is the one of ``scontrol show hostnames``. The command itself is not used: it is missing on some nodes, and
exits with status 0 when it fails. Here a name may also continue after its last bracket (``node[1-3]-ib``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import TypeVar

from mpistrat.launch.launchers import SRUN

Value = TypeVar("Value")
_MOST_HOSTS = 2**20
MOST_TASKS = 2**24
_MOST_SHOWN = 10_000  # characters of a list, in errors
_NAME = re.compile(r"[^\[\],\s]+")
_RANGE = re.compile(r"([0-9]{1,99})(?:-([0-9]{1,99}))?")
_COUNT = re.compile(r"([0-9]{1,99})(?:\(x([0-9]{1,99})\))?")
_GROUP = ("PACK_GROUP", "HET_GROUP")  # sbatch sets both; srun without sbatch sets the first only
(_SIZE,), (_RANK,), (_NODE,) = SRUN.size, SRUN.rank, SRUN.node
_COUNTS, _NODELIST = "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"
_JOB_NODELIST = "SLURM_JOB_NODELIST"
_GTIDS = "SLURM_GTIDS"
_MOST_GROUPS = 18  # digits of their number


def parsed(environ: Mapping[str, str], name: str, parse: Callable[[str], Value]) -> Value | None:
    """Return the value of a variable as ``parse`` reads it, or None if it is not set or empty.

    Raise ValueError if ``parse`` raises ValueError. The message names the variable.
    """
    value = environ.get(name, "")
    if not value:
        return None
    try:
        return parse(value)
    except ValueError as error:
        raise ValueError(f"the environment variable {name} cannot be read: {error}") from None


def expand_hostlist(text: str) -> list[str]:
    """Return the hosts of a list, in its order, with repetitions.

    Several brackets in a name multiply, and the rightmost varies fastest. Numbers keep the width of the lower bound.

    Raises
    ------
    ValueError
        If ``text`` is not a list of hosts. The message gives the position.

    Examples
    --------
    >>> expand_hostlist("n[008-010,2],login")
    ['n008', 'n009', 'n010', 'n2', 'login']
    >>> expand_hostlist("r[1-2]n[1-2]-ib")
    ['r1n1-ib', 'r1n2-ib', 'r2n1-ib', 'r2n2-ib']
    """
    hosts: list[str] = []
    position = 0
    while text:
        alternatives, position = _entry(text, position)
        if len(hosts) + math.prod(map(len, alternatives)) > _MOST_HOSTS:
            raise _error(text, position, f"more than {_MOST_HOSTS} hosts up to here")
        hosts += map("".join, product(*alternatives))
        if position == len(text):
            break
        position += 1  # the comma
    return hosts


def expand_counts(text: str) -> list[int]:
    """Return the counts of a list such as ``SLURM_STEP_TASKS_PER_NODE``.

    Raises
    ------
    ValueError
        If ``text`` is not a list of counts. The message gives the position.

    Examples
    --------
    >>> expand_counts("3,1(x2)")
    [3, 1, 1]
    """
    counts: list[int] = []
    total = position = 0
    error = partial(_error, text, wanted="a list of counts such as '3,1(x2)'")
    while True:
        match = _COUNT.match(text, position)
        if match is None:
            raise error(position, "expected a number")
        times = int(match[2] or 1)
        if not 1 <= times <= _MOST_HOSTS:
            raise error(match.start(2), f"repeated {times} times")
        if int(match[1]) > _MOST_HOSTS:
            raise error(position, f"more than {_MOST_HOSTS}")
        total += int(match[1]) * times
        if len(counts) + times > _MOST_HOSTS or total > MOST_TASKS:
            raise error(position, f"more than {_MOST_HOSTS} nodes or {MOST_TASKS} tasks up to here")
        counts += [int(match[1])] * times
        position = match.end()
        if position == len(text):
            return counts
        if text[position] != ",":
            raise error(position, "expected a comma")
        position += 1


def _entry(text: str, position: int) -> tuple[list[list[str]], int]:
    """Return the alternatives for each part of the name at ``position``, and the position after the name."""
    alternatives: list[list[str]] = []
    count = 1
    while position < len(text) and text[position] != ",":
        if text[position] == "[":
            numbers, position = _bracket(text, position)
            alternatives.append(numbers)
            count *= len(numbers)
            if count > _MOST_HOSTS:
                raise _error(text, position, f"more than {_MOST_HOSTS} hosts up to here")
            continue
        match = _NAME.match(text, position)
        if match is None:
            raise _error(text, position, f"{text[position]!r} is not allowed here")
        alternatives.append([match[0]])
        position = match.end()
    if not alternatives:
        raise _error(text, position, "expected a name")
    return alternatives, position


def _bracket(text: str, opening: int) -> tuple[list[str], int]:
    """Return the numbers of the bracket at ``opening``, and the position after the bracket."""
    numbers: list[str] = []
    position = opening
    while text[position : position + 1] != "]":
        position += 1  # the bracket, or a comma
        match = _RANGE.match(text, position)
        if match is None:
            if position == len(text):
                raise _error(text, opening, "this bracket is not closed")
            raise _error(text, position, "expected a number")
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low):
            raise _error(text, position, f"the range {match[0]} descends")
        if len(numbers) + int(high) - int(low) >= _MOST_HOSTS:
            raise _error(text, position, f"the bracket has more than {_MOST_HOSTS} hosts up to {match[0]}")
        numbers += [f"{number:0{len(low)}}" for number in range(int(low), int(high) + 1)]
        position = match.end()
        if position == len(text):
            raise _error(text, opening, "this bracket is not closed")
        if text[position] not in ",]":
            raise _error(text, position, "expected a comma, a dash or a closing bracket")
    return numbers, position + 1


def _error(text: str, position: int, problem: str, wanted: str = "a list of hosts such as 'n[1-3,7]'") -> ValueError:
    shown = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
    return ValueError(f"{shown!r} is not {wanted}: {problem}, at position {position}")


def left_over(environ: Mapping[str, str]) -> str | None:
    """Return the evidence that the variables of the step are another job's, or None without evidence.

    ``sbatch`` passes its whole environment to the batch script. Called inside a step (such as one of ``srun --pty
    bash``), it passes on that step's variables, although the script does not run in that step.

    A step of one task per node on the same nodes cannot be told apart from the batch script's own step. Raise
    ValueError if a list of nodes or counts cannot be read. The message names the variable.
    """
    components = groups(environ)
    nodes, of_job = (parsed(environ, name, expand_hostlist) for name in (_NODELIST, _JOB_NODELIST))
    if nodes and of_job and not set(nodes) <= set(of_job).union(*components):
        return f"{_NODELIST}={environ[_NODELIST]} is not part of {_JOB_NODELIST}={environ[_JOB_NODELIST]}"
    # A batch script is task 0, alone.
    tasks = environ.get(_GTIDS, "")
    several = environ.get(_RANK, "0") != "0" or "," in tasks
    of_this_job = environ.get("PMIX_NAMESPACE", "").startswith(f"slurm.pmix.{environ.get('SLURM_JOB_ID')}.")
    # In heterogeneous jobs the counts may belong to another component than the step.
    if components or several or of_this_job or environ.get(_SIZE) == "1":
        return None
    counts = parsed(environ, _COUNTS, expand_counts)
    if counts and counts[0] > 1 and tasks == "0" and environ.get(_NODE, "0") == "0":
        return f"{_COUNTS}={environ[_COUNTS]} but {_GTIDS}={tasks}"
    # `srun --preserve-env` and the shell of salloc keep the job's counts.
    pairs = ((_SIZE, "SLURM_NTASKS"), (_COUNTS, "SLURM_TASKS_PER_NODE"))
    if all(environ.get(of_step) and environ.get(job) and environ[of_step] != environ[job] for of_step, job in pairs):
        return ", ".join(f"{of_step}={environ[of_step]} but {job}={environ[job]}" for of_step, job in pairs)
    return None


def groups(environ: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return the nodes of each group of a heterogeneous job, or an empty list for other jobs.

    A job that was submitted inside a heterogeneous job inherits its variables. It is an "other job" too. Raise
    ValueError if a list of nodes cannot be read. The message names the variable.
    """
    text = environ.get("SLURM_HET_SIZE", "")
    size = int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_GROUPS else 0
    numbers = range(min(size, len(environ)))  # each group has variables
    of_jobs = {environ.get(f"SLURM_JOB_ID_{kind}_{number}") for kind in _GROUP for number in numbers} - {None}
    if of_jobs and environ.get("SLURM_JOB_ID") not in of_jobs:
        return []
    nodes = []
    for number in numbers:
        names = (f"SLURM_JOB_NODELIST_{kind}_{number}" for kind in _GROUP)
        hosts = next(filter(None, (parsed(environ, name, expand_hostlist) for name in names)), None)
        if hosts:
            nodes.append(tuple(hosts))
    return nodes
