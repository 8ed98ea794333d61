"""Functions that are sent to a rank once, and named by their digest from then on."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import xxhash

from mpistrat.messages.pickling import Packed, pack, unpack
from mpistrat.messages.post import Letter, Post

_MOST = 256  # functions that a rank keeps for another one


class SentFunction(NamedTuple):
    """A function as bytes."""

    digest: bytes  # the name of the function
    packed: Packed
    # the objects that exist once and that it refers to. They must live as long as it may run.
    references: list[Any]


def packed_function(function: Any, copy: bool = False) -> tuple[Packed, list[Any]]:
    """Return a function as `pack` does. Raise TypeError that names the function, and what in it cannot be sent."""
    try:
        return pack(function, copy=copy)
    except TypeError as error:
        name = getattr(function, "__qualname__", None) or repr(function)
        raise TypeError(f"function {name} cannot be sent{_culprit(function)}: {_reason(error)}") from error


class FunctionSender:
    """The functions that this rank has sent, and where each one is known."""

    def __init__(self, post: Post):
        self._post = post
        self._packed: weakref.WeakKeyDictionary[FunctionType, SentFunction] = weakref.WeakKeyDictionary()
        self._known: dict[int, OrderedDict[bytes, None]] = {}

    def packed(self, function: Any) -> SentFunction:
        """Return a function as bytes. A plain one is packed at its first use, with the values that it captures then.

        Methods and other callables are packed at each use. Raise TypeError that names what cannot be sent.
        """
        plain = isinstance(function, FunctionType)
        if plain and (known := self._packed.get(function)) is not None:
            return known
        packed, references = packed_function(function, copy=True)
        digest = xxhash.xxh3_128()
        for part in packed:
            for each in [part] if part is packed.stream else part:
                digest.update(each)
        sent = SentFunction(digest.digest(), packed, references)
        if plain:
            self._packed[function] = sent
        return sent

    def send(self, to: int, function: SentFunction) -> None:
        """Send a function to a rank that does not know it."""
        known = self._known.setdefault(to, OrderedDict())
        if function.digest in known:
            known.move_to_end(function.digest)
            return
        forget = known.popitem(last=False)[0] if len(known) >= _MOST else None
        known[function.digest] = None
        self._post.send(to, "function", (function.digest, forget), function.packed)


class FunctionKeeper:
    """The functions that other ranks have sent to this one."""

    def __init__(self) -> None:
        self._functions: dict[tuple[int, bytes], Packed | Any] = {}

    def keep(self, letter: Letter) -> None:
        digest, forget = letter.head
        if forget is not None:
            self._functions.pop((letter.source, forget), None)
        self._functions[letter.source, digest] = letter.body

    def function(self, source: int, digest: bytes) -> Any:
        """Return a function, which is unpacked at its first use."""
        found = self._functions[source, digest]
        if isinstance(found, Packed):
            found = self._functions[source, digest] = unpack(found)
        return found


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
