"""The progress bar of a training loop."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from mpistrat.runtime.environment import rc
from mpistrat.strategy import get_strategy


def progress(iterable: Iterable[Any], desc: str | None = None, total: int | None = None) -> Any:
    """Iterate with a progress bar on replica 0 of the current strategy.

    The bar is shown only if there is a terminal.

    Parameters
    ----------
    iterable : iterable
    desc : str, optional
        Text before the bar.
    total : int, optional
        Number of elements. Needed only if the iterable does not know its length; a distributed dataset does.

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
    from tqdm import tqdm

    steps = getattr(iterable, "cardinality", None)  # a distributed dataset has no len()
    if total is None and isinstance(steps, int) and steps >= 0:
        total = steps
    # Under a launcher stderr is a pipe: `mpistrat run` sets rc.progress if the pipe ends at a terminal.
    terminal = sys.stderr.isatty() if rc.progress is None else rc.progress
    return tqdm(
        iterable, desc=desc, total=total, disable=not (terminal and get_strategy().is_chief), leave=False
    )
