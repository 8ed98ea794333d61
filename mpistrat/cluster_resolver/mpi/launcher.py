"""The facts that launchers of MPI programs give to each rank: mpirun and mpiexec of all kinds, and jsrun."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mpistrat.cluster_resolver.variables import first_of
from mpistrat.runtime.process.launchers import MPIRUN, LauncherVariables


class Launched(NamedTuple):
    """Facts that a launcher gave to this rank. It leaves the others at None.

    Attributes
    ----------
    launcher : str
        Name of the launcher.
    rank, size : int or None
        Number of this rank, and number of all ranks.
    local_rank, local_size : int or None
        Index of this rank on its node, and number of ranks there.
    node : int or None
        Number of this rank's node.
    host : str or None
        Name of this rank's node.
    sources : mapping
        Variable that each fact was read from.
    alone : bool
        Whether only this launcher sets these variables, and no scheduler's own launcher does.
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
    """Return the facts from the launcher of an MPI program, or None if no launcher started this process.

    Raises
    ------
    ValueError
        If the value of a variable is not a number.

    Examples
    --------
    >>> launched({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}).local_rank
    1
    """
    return next(filter(None, (told(environ, each) for each in MPIRUN)), None)


def told(environ: Mapping[str, str], launcher: LauncherVariables) -> Launched | None:
    """Return the facts from this launcher, or None if it did not start this rank."""
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
