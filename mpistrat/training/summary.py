"""Summaries for TensorBoard, by the names of ``tf.summary``. The first replica writes them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat import context
from mpistrat.arrays import arrays
from mpistrat.process import mpi
from mpistrat.process.files import local_path

__all__ = [
    "SummaryWriter",
    "create_file_writer",
    "experimental",
    "flush",
    "histogram",
    "image",
    "record_if",
    "scalar",
    "should_record_summaries",
    "text",
]

# Context variables, which the threads of a rank's replicas inherit.
_writer: ContextVar[SummaryWriter | None] = ContextVar("writer", default=None)
_step: ContextVar[Any] = ContextVar("step", default=None)
_condition: ContextVar[Any] = ContextVar("condition", default=True)


def file_writer(directory: Path, suffix: str = "", purge_step: int | None = None) -> Any:
    """Return a writer of tensorboardX. TensorBoard forgets what earlier files have from ``purge_step`` on."""
    from tensorboardX import SummaryWriter

    return SummaryWriter(str(directory), purge_step=purge_step, flush_secs=1, filename_suffix=suffix)


def require_tensorboard(caller: str) -> None:
    """Raise ImportError if summaries cannot be written here."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise ImportError(f"{caller} needs tensorboardX: pip install tensorboardX")


class SummaryWriter:
    """A directory for TensorBoard. Get one by `create_file_writer`.

    Examples
    --------
    >>> import mpistrat
    >>> writer = mpistrat.summary.create_file_writer("runs/1")
    >>> with writer.as_default(step=0):
    ...     mpistrat.summary.should_record_summaries()
    True
    """

    def __init__(self, directory: Path, suffix: str):
        self._directory, self._suffix = directory, suffix
        self._file: Any = None  # opened by the first summary, on the rank that writes it

    @contextmanager
    def as_default(self, step: Any = None) -> Iterator[SummaryWriter]:
        """Context in which summaries go to this writer, by default with this step."""
        before = _writer.set(self)
        steps = None if step is None else _step.set(step)
        try:
            yield self
        finally:
            self.flush()
            if steps is not None:
                _step.reset(steps)
            _writer.reset(before)

    def set_as_default(self, step: Any = None) -> None:
        """Let summaries go to this writer from now on, by default with this step."""
        _writer.set(self)
        if step is not None:
            _step.set(step)

    def flush(self) -> None:
        """Write what was recorded to the file."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Write what was recorded, and close the file. A later summary begins another one."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def opened(self) -> Any:
        """Return the writer of tensorboardX."""
        if self._file is None:
            self._file = file_writer(self._directory, self._suffix)
        return self._file


def create_file_writer(logdir: str | os.PathLike[str], filename_suffix: str = "") -> SummaryWriter:
    """Return a writer of summaries to a directory for TensorBoard. Needs ``pip install tensorboardX``.

    Call it on all ranks. The first replica, or in cross-replica context the chief, makes the directory and writes.
    The calls of this module never communicate.

    Parameters
    ----------
    logdir : path
    filename_suffix : str

    Raises
    ------
    ImportError
        If tensorboardX is not installed.

    Examples
    --------
    >>> import mpistrat, pathlib, tempfile
    >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
    >>> folder = tempfile.TemporaryDirectory()
    >>> writer = mpistrat.summary.create_file_writer(pathlib.Path(folder.name) / "run")
    >>> with writer.as_default():
    ...     strategy.run(lambda: mpistrat.summary.scalar("loss", 0.5, step=1))
    True
    >>> writer.close()
    >>> folder.cleanup()
    """
    require_tensorboard("create_file_writer")
    return SummaryWriter(local_path(logdir), filename_suffix)


def scalar(name: str, data: Any, step: Any = None) -> bool:
    """Record a number.

    Parameters
    ----------
    name : str
        Summaries of one name make one chart.
    data : number, or array of one element
    step : int, optional
        By default the step of `SummaryWriter.as_default` or ``experimental.set_step``.

    Returns
    -------
    bool
        Whether it was recorded: False on other replicas, without a default writer, or by `record_if`.

    Raises
    ------
    ValueError
        On every replica, if it has no step, or the data is not of this kind.

    Examples
    --------
    >>> import mpistrat
    >>> mpistrat.summary.scalar("loss", 0.5, step=1)  # without a default writer
    False
    """
    value = _array(data)
    if value.size != 1:
        raise ValueError(f"summary {name!r}: a scalar has one element, not the shape {value.shape}")
    return _record(name, step, lambda file, at: file.add_scalar(name, float(value.reshape(())), at))


def histogram(name: str, data: Any, step: Any = None, buckets: int = 30) -> bool:
    """Record the distribution of the numbers in an array of any shape, in so many buckets. As `scalar`.

    Examples
    --------
    >>> import mpistrat
    >>> mpistrat.summary.histogram("weights", [1.0, 2.0], step=1)
    False
    """
    values = _array(data)
    if buckets < 1:
        raise ValueError(f"summary {name!r}: buckets must be at least 1, not {buckets}")

    def add(file: Any, at: int) -> None:
        if values.size:
            file.add_histogram(name, values.astype(np.float64).ravel(), at, bins=buckets)

    return _record(name, step, add)


def image(name: str, data: Any, step: Any = None, max_outputs: int = 3) -> bool:
    """Record up to ``max_outputs`` images. As `scalar`.

    ``data`` is of shape (images, height, width, channels) with 1, 3 or 4 channels: integers from 0 to 255 of uint8, or
    numbers from 0 to 1.

    Examples
    --------
    >>> import mpistrat, numpy as np
    >>> mpistrat.summary.image("digits", np.zeros((2, 8, 8, 1)), step=1)
    False
    """
    images = _array(data)
    if images.ndim != 4 or images.shape[-1] not in (1, 3, 4):
        raise ValueError(
            f"summary {name!r}: images have the shape (images, height, width, 1, 3 or 4 channels), not {images.shape}"
        )
    # As in TensorFlow, which clips numbers to [0, 1].
    if images.dtype != np.uint8:
        images = np.clip(images, 0.0, 1.0)

    def add(file: Any, at: int) -> None:
        for i, picture in enumerate(images[:max_outputs]):
            file.add_image(f"{name}/{i}" if i else name, picture, at, dataformats="HWC")

    return _record(name, step, add)


def text(name: str, data: str, step: Any = None) -> bool:
    """Record a text in Markdown. As `scalar`.

    Examples
    --------
    >>> import mpistrat
    >>> mpistrat.summary.text("note", "*begun*", step=1)
    False
    """
    if not isinstance(data, str):
        raise ValueError(f"summary {name!r}: text is a str, not {type(data).__name__}")
    return _record(name, step, lambda file, at: file.add_text(name, data, at))


def should_record_summaries() -> bool:
    """Return whether a summary would be recorded here: the same rules as `scalar`.

    Examples
    --------
    >>> import mpistrat
    >>> mpistrat.summary.should_record_summaries()
    False
    """
    condition = _condition.get()
    wanted = condition() if callable(condition) else condition
    return _writer.get() is not None and bool(wanted) and _writes()


@contextmanager
def record_if(condition: bool | Callable[[], Any]) -> Iterator[None]:
    """Context in which summaries are recorded only if the condition holds. A function is called at each summary.

    Examples
    --------
    >>> import mpistrat
    >>> with mpistrat.summary.record_if(lambda: mpistrat.summary.experimental.get_step() % 100 == 0):
    ...     pass  # the steps of a training
    """
    before = _condition.set(condition)
    try:
        yield
    finally:
        _condition.reset(before)


class StepNames:
    """The default step of summaries."""

    @staticmethod
    def get_step() -> Any:
        """Return the default step, or None."""
        return _step.get()

    @staticmethod
    def set_step(step: Any) -> None:
        """Set the default step: an int, or a variable that is read at each summary."""
        _step.set(step)


experimental = StepNames()


def flush(writer: SummaryWriter | None = None) -> None:
    """Write what was recorded to the file of a writer; by default of the default writer.

    Examples
    --------
    >>> import mpistrat
    >>> mpistrat.summary.flush()
    """
    writer = writer or _writer.get()
    if writer is not None:
        writer.flush()


def _record(name: str, step: Any, add: Callable[[Any, int], None]) -> bool:
    writer = _writer.get()
    if writer is None:
        return False
    step = _step.get() if step is None else step
    if step is None:
        raise ValueError(f"summary {name!r} has no step: give step=, writer.as_default(step) or set_step")
    # After the checks, so that a wrong argument raises on all replicas.
    if not should_record_summaries():
        return False
    add(writer.opened(), int(step))
    return True


def _array(data: Any) -> np.ndarray:
    return arrays.as_numpy(data.read_value() if hasattr(data, "read_value") else data)


def _writes() -> bool:
    """Return whether this is the first replica, or the chief in cross-replica context."""
    mode = context.current()
    if mode.replica_context is None:
        return bool(mode.strategy.extended.should_save_summary)
    if not context.stack() and mpi.running() and mpi.among_several():
        # Without a scope each rank is the first replica of a default strategy of its own.
        return bool(mpi.start().COMM_WORLD.rank == 0)
    # Where a replica is several ranks, its first one writes.
    return mode.replica_context.replica_id_in_sync_group == 0 and bool(mode.strategy.extended.should_save_summary)
