"""Python objects and functions as bytes, with the memory of large arrays beside them, errors, and lost ranks.

A lost rank is one whose process has died. With ULFM (``mpirun --with-ft ulfm``) the other ranks go on, and MPI calls
raise an error that names the lost ranks. Without it the launcher ends all ranks, so no rank is ever lost here.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from mpistrat.process import failure, mpi

_LARGE = 1 << 16  # bytes; smaller arrays are copied into the stream, which saves a message
_PLAIN = frozenset(
    {int, float, complex, bool, str, bytes, type(None), np.float32, np.float64, np.int32, np.int64, np.bool_}
)
_LOADERS = frozenset({tuple, list})
_LOSS_REPORT_S = 3.0  # seconds from the first error of a message until MPI names the lost rank
_NAP = 0.01


class Packed(NamedTuple):
    """An object as bytes."""

    stream: Any  # the pickle
    buffers: tuple[Any, ...] = ()  # the memory of large arrays, in the order in which the pickle refers to it


EMPTY = Packed(b"")


class _Sending(threading.local):
    def __init__(self) -> None:
        self.references: list[Any] | None = None


_now = _Sending()


@contextmanager
def _references() -> Iterator[list[Any]]:
    before, _now.references = _now.references, []
    try:
        yield _now.references
    finally:
        _now.references = before


def refer(value: Any) -> bool:
    """Note that a message refers to ``value``, which exists once. Return whether a message is being packed.

    Its ``__reduce__`` calls this. Elsewhere, such as for a file, the object has to refuse.
    """
    if _now.references is None:
        return False
    _now.references.append(value)
    return True


def pack(value: Any, *, copy: bool = False) -> tuple[Packed, list[Any]]:
    """Return an object as bytes, and the objects that it refers to: functions and classes of the program go by value.

    With ``copy`` large arrays are copied now. Otherwise they must not change before they are sent. Raise TypeError if a
    part of the object cannot be sent.
    """
    buffers: list[Any] = []

    def aside(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < _LARGE:
            return True
        buffers.append(bytearray(view) if copy else view)
        return False

    if is_plain(value):
        return Packed(pickle.dumps(value, 5, buffer_callback=aside), tuple(buffers)), []
    import cloudpickle

    with _references() as references:
        try:
            stream = cloudpickle.dumps(value, 5, buffer_callback=aside)
        except RecursionError:
            raise
        except Exception as error:  # cloudpickle raises errors of many classes
            raise TypeError(f"cannot be sent: {error}") from error
    return Packed(stream, tuple(buffers)), references


def unpack(packed: Packed) -> Any:
    """Return the object of `pack`. Arrays use the memory of the buffers."""
    return pickle.loads(packed.stream, buffers=packed.buffers)


def is_plain(value: Any) -> bool:
    """Return whether a value holds only numbers, strings and arrays, which need no cloudpickle (30 us)."""
    kind = type(value)
    if kind in _PLAIN:
        return True
    if kind is np.ndarray:
        return not value.dtype.hasobject
    if kind in _LOADERS:
        return all(map(is_plain, value))
    return kind is dict and all(map(is_plain, value)) and all(map(is_plain, value.values()))


def refuse(subject: str) -> NoReturn:
    """Raise the TypeError of an object that is not sent by value, outside of a message."""
    raise TypeError(f"{subject} cannot be pickled: it is sent between the ranks of its own job only")


class RemoteTraceback(Exception):
    """The cause of an error of another rank: where it was raised there."""


class Failure(NamedTuple):
    """An error of another rank."""

    pickled: bytes | None  # the exception; None if it cannot be sent
    summary: str  # its class and message
    where: str  # the rank and its role
    text: str  # its traceback

    def error(self) -> BaseException:
        """Return the exception. Its cause shows the other rank and its traceback."""
        exception: BaseException
        try:
            exception = RuntimeError(self.summary) if self.pickled is None else pickle.loads(self.pickled)
        except Exception:  # the class takes other arguments than those it keeps
            exception = RuntimeError(self.summary)
        exception.__cause__ = RemoteTraceback(f"\non {self.where}:\n{self.text}")
        return exception


def failure_of(error: BaseException, where: str) -> Failure:
    """Return an error as it is sent. SystemExit and the like become RuntimeError; KeyboardInterrupt stays."""
    summary = "".join(traceback.format_exception_only(type(error), error)).strip()
    pickled = None
    if isinstance(error, (Exception, KeyboardInterrupt)):
        import cloudpickle

        try:
            pickled = cloudpickle.dumps(error)
            pickle.loads(pickled)
        except Exception:
            pickled = None
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Failure(pickled, summary, where, text)


class LostRankError(RuntimeError):
    """A rank was lost that this one needs.

    Attributes
    ----------
    rank : int
        The lost rank.

    Examples
    --------
    >>> raise LostRankError("ps 0 (rank 6) was lost: load the last checkpoint in a new job", 6)
    Traceback (most recent call last):
    mpistrat.messages.pickling.LostRankError: ps 0 (rank 6) was lost: load the last checkpoint in a new job
    """

    def __init__(self, text: str, rank: int):
        super().__init__(text, rank)
        self.text, self.rank = text, rank

    def __str__(self) -> str:
        return self.text


class RepeatedLossError(LostRankError):
    """Several workers were lost, one after the other, while they ran the same function."""


class Losses:
    """The lost ranks of a communicator. ``survived`` says whether the other ranks go on after a loss."""

    def __init__(self, comm: Any, name: Callable[[int], str]):
        self._comm, self._name = comm, name
        self.ranks: set[int] = set()
        self.survived = mpi.survives_losses()
        if self.survived:
            failure.revoke_at_end(comm)
            mpi.leave_without_finalize()

    def note(self, error: Any) -> None:
        """Note the lost ranks that an MPI error is about, or raise it. End this rank if another one ends the job."""
        MPI, kind = mpi.start(), error.Get_error_class()
        if self.survived and kind == MPI.ERR_REVOKED:
            failure.end_job("")
        if not self.survived:
            raise error
        lost = self._lost()
        if kind not in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING):
            # A connection that breaks is often the first sign of a loss: in 5 of 20 runs MPI_ERR_OTHER came first.
            # The launcher tells of the loss soon after.
            end = time.monotonic() + _LOSS_REPORT_S
            while lost <= self.ranks and time.monotonic() < end:
                time.sleep(_NAP)
                with contextlib.suppress(MPI.Exception):
                    self._comm.Iprobe(MPI.ANY_SOURCE)  # MPI learns of losses while it is called
                lost = self._lost()
            if lost <= self.ranks:
                raise error
        self.ranks.update(lost)

    def _lost(self) -> set[int]:
        """Return the ranks that MPI knows to have failed, and let it receive from any source again."""
        failed, group = self._comm.Get_failed(), self._comm.Get_group()
        try:
            lost = type(failed).Translate_ranks(failed, list(range(failed.size)), group)
            self._comm.Ack_failed(failed.size)
        finally:
            failed.Free()
            group.Free()
        return set(lost)

    def error(self, rank: int) -> LostRankError:
        return LostRankError(f"{self._name(rank)} was lost: its process has died, or its node", rank)


def packed_function(function: Any, copy: bool = False) -> tuple[Packed, list[Any]]:
    """Return a function as `pack` does. Raise TypeError that names the function, and what in it cannot be sent."""
    try:
        return pack(function, copy=copy)
    except TypeError as error:
        name = getattr(function, "__qualname__", None) or repr(function)
        raise TypeError(f"function {name} cannot be sent{_culprit(function)}: {_reason(error)}") from error


def pack_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Packed, list[Any]]:
    """Return the arguments of a call as bytes, and the objects that they refer to. Large arrays are copied.

    Raise TypeError that names an argument that cannot be sent.
    """
    try:
        return pack((args, kwargs), copy=True)
    except TypeError as error:
        for name, value in [*enumerate(args), *kwargs.items()]:
            reason = _refusal(value)
            if reason:
                raise TypeError(
                    f"argument {name!r} of the call, a {type(value).__name__}, cannot be sent: {reason}"
                ) from error
        raise


def _refusal(value: Any) -> str:
    """Return why a value cannot be sent, or an empty text if it can."""
    try:
        pack(value)
    except TypeError as error:
        return _reason(error)
    return ""


def _reason(error: TypeError) -> str:
    return str(error).removeprefix("cannot be sent: ")


def _culprit(function: Any) -> str:
    """Return the name that a function captures and that cannot be sent, in words."""
    for name, value in captured(function):
        if _refusal(value):
            return f", because of {name!r}, a {type(value).__name__} that it captures"
    return ""


def captured(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function captures: the object of a method, cells, defaults, and globals, with their names."""
    if isinstance(function, MethodType):
        yield "self", function.__self__
        function = function.__func__
    if not isinstance(function, FunctionType):
        return
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a cell that is not filled yet
            yield name, cell.cell_contents
    positional, defaults = code.co_varnames[: code.co_argcount], function.__defaults__ or ()
    yield from zip(positional[len(positional) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    for name in _names(code):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _names(code: CodeType) -> Iterator[str]:
    """Yield the global names of a function, and of the functions in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
