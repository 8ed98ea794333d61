"""The progress of a training loop: a bar on a terminal or in a notebook, lines in a log."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from mpistrat.process import mpi
from mpistrat.runtime.environment import rc
from mpistrat.strategy import Strategy, get_strategy
from mpistrat.version import __version__

_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")


def progress(iterable: Iterable[Any], desc: str | None = None, total: int | None = None, every: float = 30.0) -> Any:
    """Iterate and show the progress, on replica 0 of the current strategy.

    A terminal or a notebook shows a bar. A log gets a line now and then: steps done, the time passed and left, the
    rate, and what ``set_postfix`` was given. The first of these lines follows one that describes the job. A loop
    that is shorter than ``every`` writes nothing to a log. ``MPISTRAT_PROGRESS=0`` turns all of it off.

    Parameters
    ----------
    iterable : iterable
    desc : str, optional
        Text before the bar.
    total : int, optional
        Number of elements. Needed only if the iterable does not know its length; a distributed dataset does.
    every : float, default 30
        Seconds between lines in a log.

    Returns
    -------
    tqdm.tqdm
        The iterable. ``set_postfix`` and the other methods of tqdm work on every replica.

    Examples
    --------
    >>> sum(progress(range(4)))
    6
    >>> import mpistrat
    >>> dataset = mpistrat.data.Dataset.range(10).batch(4)
    >>> progress(mpistrat.MultiWorkerMirroredStrategy().experimental_distribute_dataset(dataset)).total
    3
    """
    strategy = get_strategy()
    shown = rc.progress is not False and strategy.is_chief
    if "ipykernel" in sys.modules:
        from tqdm.auto import tqdm
    else:
        from tqdm import tqdm

        # Under a launcher stderr is a pipe: `mpistrat run` sets rc.progress if the pipe ends at a terminal.
        if shown and not (sys.stderr.isatty() or rc.progress):
            from mpistrat.runtime.progress_log import ProgressLog  # imports tqdm

            return ProgressLog(iterable, _job(strategy), every, desc, total)
    return tqdm(iterable, desc=desc, total=total, disable=not shown, leave=False)


def _job(strategy: Strategy) -> str:
    """Describe the job in one line: version, ranks, nodes, device, MPI library, job of the scheduler."""
    engine = strategy.extended.engine
    ranks = engine.topology.ranks_per_node
    words = [f"mpistrat {__version__}", f"{sum(ranks)} rank(s) on {len(ranks)} node(s)", *engine.devices]
    if mpi.running():  # a program without a strategy does not start MPI
        library = mpi.start().Get_library_version().partition("\n")[0].partition(",")[0]
        words.append(" ".join(library.split()))
    words += [f"{name}={os.environ[name]}" for name in _JOBS if name in os.environ]
    return ", ".join(words)
