"""What the launcher of MPI programs tells each rank: mpirun and mpiexec of all kinds, and jsrun."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mpistrat.cluster_resolver.variables import first_of
from mpistrat.runtime.process.launchers import MPIRUN, LauncherVariables


class Launched(NamedTuple):
    """What a launcher told this rank. What it did not is None.

    Attributes
    ----------
    launcher : str
        What users call it.
    rank, size, local_rank, local_size, node : int or None
        This rank's number, that of all ranks, the same among those of its node, and the number of its node.
    host : str or None
        The name of its node.
    sources : mapping
        For each of these the variable.
    alone : bool
        Whether no scheduler's own launcher sets these variables.
    """

    launcher: str
    rank: int
    size: int | None
    local_rank: int | None
    local_size: int | None
    node: int | None
    host: str | None
    sources: Mapping[str, str]
    alone: bool = False


def launched(environ: Mapping[str, str]) -> Launched | None:
    """What the launcher of an MPI program told this rank, None if none started it.

    Raises
    ------
    ValueError
        If a variable holds no number.

    Examples
    --------
    >>> launched({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}).local_rank
    1
    """
    return next(filter(None, (told(environ, each) for each in MPIRUN)), None)


def told(environ: Mapping[str, str], launcher: LauncherVariables) -> Launched | None:
    """What this launcher told this rank, None if it did not start it."""
    rank, variable = first_of(environ, launcher.rank)
    if rank is None:
        return None
    sources = {"launcher": variable, "rank": variable}
    numbers: dict[str, int | None] = {}
    for fact in ("size", "local_rank", "local_size", "node"):
        numbers[fact], variable = first_of(environ, getattr(launcher, fact))
        sources[fact] = variable
    host = next((name for name in launcher.host if environ.get(name)), None)
    sources["host"] = host or ""
    return Launched(
        launcher.name,
        rank,
        host=environ[host] if host else None,
        sources=sources,
        alone=launcher.alone,
        **numbers,
    )
