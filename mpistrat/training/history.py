"""The progress of a training loop, and its history."""

from __future__ import annotations

import csv
import html
import math
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from mpistrat import nest, representation
from mpistrat.arrays import arrays
from mpistrat.collectives import structures
from mpistrat.process import mpi
from mpistrat.process.files import appearing, local_path
from mpistrat.representation import grouped, require
from mpistrat.runtime.environment import rc
from mpistrat.strategy import Strategy, get_strategy
from mpistrat.training.checkpoint.checkpoint import Checkpoint
from mpistrat.training.checkpoint.names import as_structure, named
from mpistrat.training.checkpoint.variables import ranks_of, save
from mpistrat.training.summary import file_writer, require_tensorboard
from mpistrat.values import DistributedValues
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
    from mpistrat.runtime.progress import progress_of  # imports tqdm

    # Under a launcher stderr is a pipe: `mpistrat run` sets rc.progress if the pipe ends at a terminal.
    return progress_of(iterable, shown, rc.progress, every, desc, total, header=lambda: _job(strategy))


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


_STEPS = ("step", "epoch")  # what counts the rows, the first of these that there is
_MOST_SHOWN = 20  # rows of the table in a notebook


class History:
    """The values of each epoch: printed, in files, the best of them kept as a checkpoint.

    Parameters
    ----------
    csv : path, optional
        A file with a line for each `log` and a column for each name. The chief writes it.
    tensorboard : path, optional
        A directory for TensorBoard. Needs ``pip install tensorboardX``. The chief writes it.
    monitor : str
        The name of the value that says which row is the best. `log` raises if it differs between ranks.
    mode : {"min", "max"}
        Whether the best value is the smallest or the largest. NaN is never the best.
    patience : int, optional
        After how many values in a row that are not better `log` returns True.
    keep_best : path, optional
        A file in which ``state`` is saved whenever the monitored value is the best so far.
    state : structure of variables and arrays, or Checkpoint
        What ``keep_best`` saves, by `save` or `Checkpoint.write`.

    Attributes
    ----------
    rows : list of dict
        The values of each `log`, equal on all ranks.
    best : dict or None
        The row of the best monitored value.

    Raises
    ------
    ValueError
        If ``mode`` is another text, ``patience`` is below 1, or only one of ``keep_best`` and ``state`` is given.
    ImportError
        If ``tensorboard`` is given, and tensorboardX is not installed.

    Examples
    --------
    >>> history = History(patience=2)
    >>> for epoch, loss in enumerate([0.5, 0.25, 0.375, 0.25]):
    ...     if history.log(epoch=epoch, loss=loss):
    ...         break
    epoch     0  loss     0.5000
    epoch     1  loss     0.2500
    epoch     2  loss     0.3750
    epoch     3  loss     0.2500
    >>> history.best
    {'epoch': 1, 'loss': 0.25}
    """

    def __init__(
        self,
        csv: str | os.PathLike[str] | None = None,
        tensorboard: str | os.PathLike[str] | None = None,
        monitor: str = "loss",
        mode: Literal["min", "max"] = "min",
        patience: int | None = None,
        keep_best: str | os.PathLike[str] | None = None,
        state: Any = None,
    ):
        require(mode in ("min", "max"), "mode must be 'min' or 'max'", mode)
        require(patience is None or patience >= 1, "patience must be at least 1", patience)
        if (keep_best is None) != (state is None):
            raise ValueError("give keep_best, the file, and state, what is saved in it, together")
        if tensorboard is not None:
            require_tensorboard("tensorboard=")
        self._csv, self._tensorboard, self._keep_best = (
            None if path is None else local_path(path) for path in (csv, tensorboard, keep_best)
        )
        if state is not None and not isinstance(state, Checkpoint):
            state = as_structure(state)
            named(state)  # raises here, not after an epoch, if it cannot be saved
        self._monitor, self._mode, self._patience, self._state = monitor, mode, patience, state
        self._columns: list[str] = []  # of the file, as this object has written it
        self._writer: Any = None
        self._forget()

    def _forget(self) -> None:
        self.rows: list[dict[str, int | float]] = []
        self.best: dict[str, int | float] | None = None
        self._waited = 0  # values since the best one

    def log(self, **values: Any) -> bool:
        """Print and keep the values of an epoch, and return whether to stop. Collective, outside of `Strategy.run`.

        The ranks are the ranks of the current strategy, or outside of every scope all ranks of the job.

        The monitored value must be equal on all ranks. Other values, such as seconds, may differ: the chief's are kept.
        Means over the replicas come from metrics and from `Strategy.reduce`.

        Parameters
        ----------
        **values : number, or array of one element
            ``step`` or ``epoch`` counts the rows for TensorBoard and `plot`.

        Returns
        -------
        bool
            The same on all ranks: whether the last ``patience`` monitored values were not better than the best.

        Raises
        ------
        TypeError
            If a value is not a number, such as a `PerReplica`.
        ValueError
            If the monitored value is missing, and ``patience`` or ``keep_best`` needs it.
        MismatchError
            On every rank, if the names or the monitored value differ between ranks, or if only some ranks raise one
            of the above.
        OSError
            On every rank, if a file cannot be written.
        RuntimeError
            In a replica context.
        """
        checkpoint = self._state if isinstance(self._state, Checkpoint) else None
        leaves = checkpoint.leaves() if checkpoint is not None else nest.flatten(self._state)[0]
        topology, _ = ranks_of(leaves, "History.log")
        # A value that is wrong on one rank raises on all of them: the others would wait in `agree`.
        with structures.refusals("History.log", topology):
            row = {name: _number(name, value) for name, value in values.items()}
            needs = self._patience is not None or self._keep_best is not None
            if needs and self._monitor not in row:
                raise ValueError(f"History.log got {', '.join(row)}, without {self._monitor!r}, which it monitors")
        watched = row.get(self._monitor)
        structures.agree(topology, "History.log", "of", tuple(row), f"with {self._monitor}={watched!r}")
        row = topology.on_first(lambda: self._write(row))
        if self._keep(row) and self._keep_best is not None:
            if checkpoint is not None:
                checkpoint.write(self._keep_best)
            else:
                save(self._state, self._keep_best)
        return self._patience is not None and self._waited >= self._patience

    def _keep(self, row: dict[str, int | float]) -> bool:
        """Add a row. Return whether it is the best so far."""
        self.rows.append(row)
        if self._monitor not in row:
            return False
        sign = 1 if self._mode == "min" else -1
        value, best = (metrics[self._monitor] * sign for metrics in (row, self.best or row))
        if not math.isnan(value) and (self.best is None or value < best):
            self.best, self._waited = row, 0
            return True
        self._waited += 1
        return False

    def _write(self, row: dict[str, int | float]) -> dict[str, int | float]:
        """Print a row and write it to the files. On the chief."""
        if self._csv is not None:
            self._write_csv(row)
        if self._tensorboard is not None:
            step = int(_step(row, len(self.rows)))
            if self._writer is None:
                # After a restart TensorBoard forgets what the run before logged after its last checkpoint.
                rows = len(self.rows)  # in the file's name, which else has seconds only
                self._writer = file_writer(self._tensorboard, f".{rows}", step if rows else None)
            for name in row.keys() - set(_STEPS):
                self._writer.add_scalar(name, row[name], step)
        from tqdm import tqdm

        # Removes the bars of this process, prints, and draws them again below the line.
        tqdm.write("  ".join(f"{name} {_text(value)}" for name, value in row.items()))
        sys.stdout.flush()  # a pipe or a log shows it now
        return row

    def _write_csv(self, row: dict[str, int | float]) -> None:
        """Append a line. Write the file anew at the first line, and if there is a new column."""
        assert self._csv is not None
        # A new column needs another header, and a restored history has fewer rows than the file.
        if not self._columns or not row.keys() <= set(self._columns):
            self._columns = list(dict.fromkeys(name for metrics in (*self.rows, row) for name in metrics))
            self._csv.parent.mkdir(parents=True, exist_ok=True)
            with appearing(self._csv, replace=True) as path, open(path, "w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, self._columns, lineterminator="\n")
                writer.writeheader()
                writer.writerows([*self.rows, row])
        else:
            with open(self._csv, "a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns, lineterminator="\n").writerow(row)

    def plot(self) -> Any:
        """Return a figure of matplotlib with a panel for each value; ``loss`` and ``val_loss`` share one. Local.

        Needs matplotlib. A notebook shows the figure, ``figure.savefig(path)`` saves it.
        """
        from matplotlib import pyplot as plt

        names = dict.fromkeys(name for row in self.rows for name in row if name not in _STEPS)
        panels = grouped((name.removeprefix("val_"), name) for name in names)
        figure, all_axes = plt.subplots(
            max(len(panels), 1), figsize=(6, 1 + 2.6 * len(panels)), squeeze=False, sharex=True, layout="constrained"
        )
        for axes, (title, together) in zip(all_axes[:, 0], panels.items(), strict=False):
            for name in together:
                points = [(_step(row, i), row[name]) for i, row in enumerate(self.rows) if name in row]
                axes.plot(*zip(*points, strict=True), label=name)
            axes.set_ylabel(title)
            if len(together) > 1:
                axes.legend()
        all_axes[-1, 0].set_xlabel(next((step for step in _STEPS if self.rows and step in self.rows[0]), "row"))
        return figure

    def get_state(self) -> dict[str, Any]:
        """Return the rows, for a checkpoint: ``Checkpoint(history=history, ...)`` keeps them. Local."""
        return {"rows": [dict(row) for row in self.rows]}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take the rows of `get_state`: the best row and the patience go on from there. Local.

        The CSV file is written anew at the next `log`, without the rows that came after the checkpoint.
        """
        self._forget()
        # Without columns the file is written anew, and without a writer a new event file is begun.
        self._columns, self._writer = [], None
        for row in state["rows"]:
            self._keep(dict(row))

    def __repr__(self) -> str:
        return representation.text("History", {"rows": len(self.rows), "best": self.best})

    def _repr_html_(self) -> str:
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        table = f"<tr>{''.join(f'<th>{html.escape(name)}</th>' for name in names)}</tr>"
        for row in self.rows[-_MOST_SHOWN:]:
            cells = (f"{_text(row[name])}" if name in row else "" for name in names)
            cell = "b" if row is self.best else "span"
            table += f"<tr>{''.join(f'<td><{cell}>{text}</{cell}></td>' for text in cells)}</tr>"
        more = len(self.rows) - _MOST_SHOWN
        caption = f"History{f', without the first {more} rows' if more > 0 else ''}"
        return f"<table><caption><b>{caption}</b></caption><tbody>{table}</tbody></table>"


def _number(name: str, value: Any) -> int | float:
    """Return a value as a number of Python."""
    if not isinstance(value, (int, float)):
        array = None if isinstance(value, (str, DistributedValues)) else arrays.as_numpy(value)
        if array is None or array.size != 1 or array.dtype.kind not in "biuf":
            raise TypeError(
                f"{name} must be a number, not {value!r}: make one value of those of the replicas, by Strategy.reduce "
                "or a metric's result()"
            )
        value = array.item()
    return int(value) if isinstance(value, int) else float(value)


def _step(row: Mapping[str, int | float], number: int) -> int | float:
    """Return the number of a row, by the first of `_STEPS` that it has."""
    return next((row[name] for name in _STEPS if name in row), number)


def _text(value: int | float) -> str:
    if isinstance(value, int):
        return f"{value:5}"
    return f"{value:10.4f}" if 1e-3 <= abs(value) < 1e5 or not value else f"{value:10.3e}"
