"""Managers of the checkpoints in a directory, by the names of ``tf.train.CheckpointManager``.

The list is the file ``checkpoint`` in the directory. A checkpoint is whole and has its name before the list names it,
and the list is on the disk before a checkpoint is deleted: a program that is killed between two of these leaves a
newest checkpoint that can be restored.
"""

from __future__ import annotations

import json
import logging
import math
import numbers
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from mpistrat.data import DataFileError
from mpistrat.process.files import local_path, replace_text
from mpistrat.representation import require
from mpistrat.training.checkpoint.checkpoint import Checkpoint, few
from mpistrat.training.checkpoint.variables import ranks_of

_LIST = "checkpoint"
_MOST_OF_LIST = 16 << 20  # bytes, of a hundred thousand checkpoints
_NAME = re.compile(r"[^/\0]+-\d+")
_HOUR = 3600.0
_log = logging.getLogger(__name__)


class _Listing(NamedTuple):
    """The checkpoints that the list of a directory names, the oldest first, and their times."""

    names: list[str]
    times: list[float]
    last_preserved: float


class CheckpointManager:
    """Saves a `Checkpoint` to numbered files of a directory, and keeps the newest.

    All methods and properties give the same answer on every rank. The methods and the constructor are collective; the
    chief writes and deletes.

    Parameters
    ----------
    checkpoint : Checkpoint
    directory : path
        Created if it does not exist. It may be moved: the list in it has relative names.
    max_to_keep : int or None
        How many checkpoints are kept. None keeps all.
    keep_checkpoint_every_n_hours : float, optional
        A checkpoint that would be deleted stays on disk if it is so much newer than the one that stayed before.
    checkpoint_name : str
        The part of the files' names before the number.
    step_counter : Variable or callable, optional
        What `checkpoint_interval` counts. For steps of an optimizer ``lambda: optimizer.iterations``.
    checkpoint_interval : int, optional
        The fewest steps between two checkpoints.
    init_fn : callable, optional
        Called without arguments by `restore_or_initialize`, if the directory has no checkpoint.

    Raises
    ------
    ValueError
        If ``max_to_keep`` is below 1, ``checkpoint_name`` is not a plain name, or there is an interval without
        ``step_counter``.
    TypeError
        If ``checkpoint`` is not a Checkpoint, or ``step_counter`` is a number, which does not change.
    DataFileError
        On every rank, if the list in the directory is damaged.
    OSError
        On every rank, if the directory cannot be created or read.

    Examples
    --------
    >>> import mpistrat, tempfile
    >>> with mpistrat.MultiWorkerMirroredStrategy().scope():
    ...     v = mpistrat.Variable(0.0)
    >>> folder = tempfile.TemporaryDirectory()
    >>> manager = CheckpointManager(Checkpoint(v=v), folder.name, max_to_keep=2)
    >>> for step in range(3):
    ...     _ = v.assign(step)
    ...     _ = manager.save()
    >>> [os.path.basename(path) for path in manager.checkpoints]
    ['ckpt-2', 'ckpt-3']
    >>> _ = v.assign(-1.0)
    >>> _ = manager.restore_or_initialize()
    >>> float(v)
    2.0
    >>> folder.cleanup()
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: Any = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], object] | None = None,
    ):
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError(f"checkpoint must be a mpistrat.training.Checkpoint, not {checkpoint!r}")
        require(
            max_to_keep is None or max_to_keep >= 1, "max_to_keep must be at least 1, or None to keep all", max_to_keep
        )
        if checkpoint_interval is not None and step_counter is None:
            raise ValueError("checkpoint_interval counts steps: give step_counter, the variable that has them")
        if isinstance(step_counter, numbers.Number):
            raise TypeError(
                f"step_counter must be a variable or a function, not {step_counter!r}, which does not change: for the "
                "steps of an optimizer give lambda: optimizer.iterations"
            )
        require(_NAME.fullmatch(f"{checkpoint_name}-1"), "checkpoint_name must be a name without '/'", checkpoint_name)
        self._checkpoint, self._directory = checkpoint, local_path(directory)
        self._name, self._most = checkpoint_name, max_to_keep
        self._preserving = keep_checkpoint_every_n_hours * _HOUR if keep_checkpoint_every_n_hours else math.inf
        self._steps, self._interval, self._init_fn = step_counter, checkpoint_interval, init_fn
        self._last_step: int | None = None
        self._list_bytes: bytes | None = None  # as the chief last read or wrote it: a change is by another job

        def begin() -> _Listing:
            self._directory.mkdir(parents=True, exist_ok=True)
            now = time.time()
            # 1 s back, as in TensorFlow, which so avoids a race between managers that are made in quick succession.
            listing = read_listing(self._directory) or _Listing([], [], now - 1)
            existing = [i for i, name in enumerate(listing.names) if (self._directory / name).is_file()]
            if gone := [name for i, name in enumerate(listing.names) if i not in existing]:
                left = listing.names[existing[-1]] if existing else "nothing"
                _log.warning(
                    "%s lists checkpoints whose files are gone: %s; restore_or_initialize() restores %s",
                    self._directory / _LIST,
                    few(gone),
                    left,
                )
            self._list_bytes = _bytes_of(self._directory)
            last = min(listing.last_preserved, now)  # of a clock that was set back
            return _Listing([listing.names[i] for i in existing], [listing.times[i] for i in existing], last)

        self._listing: _Listing = self._on_chief(begin)

    def _on_chief(self, function: Callable[[], Any]) -> Any:
        return ranks_of(self._checkpoint.leaves(), "CheckpointManager")[0].on_first(function)

    def _step(self) -> int:
        return int(self._steps() if callable(self._steps) else self._steps)

    @property
    def directory(self) -> str:
        """The directory."""
        return str(self._directory)

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that is saved."""
        return self._checkpoint

    @property
    def checkpoint_interval(self) -> int | None:
        """The fewest steps between two checkpoints."""
        return self._interval

    @property
    def checkpoints(self) -> list[str]:
        """The paths of the checkpoints that are kept, the oldest first."""
        return [str(self._directory / name) for name in self._listing.names]

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest checkpoint, None without one."""
        return self.checkpoints[-1] if self._listing.names else None

    def save(self, checkpoint_number: Any = None, check_interval: bool = True) -> str | None:
        """Save the checkpoint, delete the oldest beyond ``max_to_keep``, and return the path.

        Parameters
        ----------
        checkpoint_number : int or Variable, optional
            The number in the file's name; by default the number of this call of `save`.
        check_interval : bool
            Whether to save only if `checkpoint_interval` steps have passed. Without any step since the last
            checkpoint nothing is saved in either case.

        Returns
        -------
        str or None
            None if nothing was saved.

        Raises
        ------
        ValueError, MismatchError, TypeError, OSError
            As `Checkpoint.save`.
        """
        step = None if self._interval is None else self._step()
        if step is not None and self._last_step is not None:
            assert self._interval is not None
            if step == self._last_step or (check_interval and step < self._last_step + self._interval):
                return None
        path = self._checkpoint.save(self._directory / self._name, checkpoint_number)
        self._listing = self._on_chief(lambda: self._add(Path(path).name))
        self._last_step = step
        return path

    def _add(self, name: str) -> _Listing:
        """Add a checkpoint to the list, and delete the oldest beyond ``max_to_keep``. On the chief."""
        kept = [(path, when) for path, when in zip(*self._listing[:2], strict=True) if path != name]
        kept.append((name, time.time()))
        last_preserved = self._listing.last_preserved
        leaving = []
        while self._most is not None and len(kept) > self._most:
            oldest, when = kept.pop(0)
            # Not deleted, but no longer in the list: `max_to_keep` does not count it.
            if when >= last_preserved + self._preserving:
                last_preserved = when
            else:
                leaving.append(oldest)
        new = _Listing([path for path, _ in kept], [when for _, when in kept], last_preserved)
        if _bytes_of(self._directory) not in (None, self._list_bytes):
            _log.warning(
                "%s was changed by another program since this one read or wrote it: two jobs that manage one directory "
                "replace and delete the checkpoints of each other; give each a directory of its own",
                self._directory / _LIST,
            )
        text = {
            "model_checkpoint_path": new.names[-1],
            "all_model_checkpoint_paths": new.names,
            "all_model_checkpoint_timestamps": new.times,
            "last_preserved_timestamp": new.last_preserved,
        }
        replace_text(self._directory / _LIST, json.dumps(text, indent=1) + "\n")
        self._list_bytes = _bytes_of(self._directory)
        # After the list is on the disk: a program killed here leaves files without an entry, no entry without file.
        for path in leaving:
            try:
                (self._directory / path).unlink(missing_ok=True)
            except OSError as error:  # the new checkpoint is there, and listed
                _log.warning("a checkpoint that is listed no more was not deleted, remove it: %s", error)
        return new

    def restore_or_initialize(self) -> str | None:
        """Restore the newest checkpoint and return its path. Without one, call ``init_fn`` and return None.

        Raises
        ------
        ValueError, DataFileError, ChecksumError
            As `Checkpoint.restore`.
        """
        path = self.latest_checkpoint
        if path is None:
            if self._init_fn is not None:
                self._init_fn()
            return None
        self._checkpoint.restore(path)
        if self._steps is not None:
            self._last_step = self._step()
        return path

    def __repr__(self) -> str:
        return f"<CheckpointManager of {len(self._listing.names)} checkpoints in {self.directory!r}>"


def latest_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> str | None:
    """Return the path of the newest checkpoint of a directory by its list, None without one. Collective.

    As in TensorFlow, None, with an error in the log, if its file is not there any more.

    Raises
    ------
    DataFileError
        On every rank, if the list is damaged.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     print(latest_checkpoint(folder))
    None
    """
    directory = local_path(checkpoint_dir)

    def newest() -> str | None:
        listing = read_listing(directory)
        name = listing.names[-1] if listing is not None and listing.names else None
        if name is not None and not (directory / name).is_file():
            _log.error("%s is gone: name another checkpoint to restore()", directory / name)
            return None
        return name

    name = ranks_of((), "latest_checkpoint")[0].on_first(newest)
    return None if name is None else str(directory / name)


def read_listing(directory: Path) -> _Listing | None:
    """Return the checkpoints in the list of a directory, None without a list.

    Raise DataFileError if the list is damaged, or has names of files elsewhere.
    """
    path, text = directory / _LIST, _bytes_of(directory)
    if text is None:
        return None
    try:
        listing = json.loads(text)
        names = [str(name) for name in listing["all_model_checkpoint_paths"]]
        times = [float(when) for when in listing["all_model_checkpoint_timestamps"]]
        if len(names) != len(times) or not all(map(_NAME.fullmatch, names)):
            raise ValueError("its names are not those of checkpoints beside it")
        return _Listing(names, times, float(listing["last_preserved_timestamp"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DataFileError(
            f"file {str(path)!r}: it is not a list of checkpoints ({error}); fix: remove it, and name the checkpoint "
            "to Checkpoint.restore"
        ) from None


def _bytes_of(directory: Path) -> bytes | None:
    """Return the first bytes of the list of a directory, None without a list."""
    try:
        with open(directory / _LIST, "rb") as file:
            # Bounded: another file of this name may have any size. A list that is cut off is not valid JSON.
            return file.read(_MOST_OF_LIST + 1)
    except FileNotFoundError:
        return None
