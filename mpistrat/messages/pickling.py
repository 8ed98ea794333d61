"""Python objects as bytes, with the memory of large arrays beside them."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import numpy as np

_LARGE = 1 << 16  # bytes; smaller arrays are copied into the stream, which saves a message
_PLAIN = frozenset(
    {int, float, complex, bool, str, bytes, type(None), np.float32, np.float64, np.int32, np.int64, np.bool_}
)
_LOADERS = frozenset({tuple, list})


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


def refuse(what: str) -> NoReturn:
    """Raise the TypeError of an object that is not sent by value, outside of a message."""
    raise TypeError(f"{what} cannot be pickled: it is sent between the ranks of its own job only")
