"""Functions that are sent to a rank once, and named by their digest from then on."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from types import FunctionType
from typing import Any, NamedTuple

import xxhash

from mpistrat.messages.pickling import Packed, pack, unpack
from mpistrat.messages.post import Letter, Post

_MOST = 256  # functions that a rank keeps for another one


class SentFunction(NamedTuple):
    """A function as bytes.

    Attributes
    ----------
    digest : bytes
        Its name.
    packed : Packed
    references : list
        The objects that exist once and that it refers to. They must live as long as it may run.
    """

    digest: bytes
    packed: Packed
    references: list[Any]


class FunctionSender:
    """The functions that this rank has sent, and where each one is known.

    Parameters
    ----------
    post : Post
    """

    def __init__(self, post: Post):
        self._post = post
        self._packed: weakref.WeakKeyDictionary[FunctionType, SentFunction] = weakref.WeakKeyDictionary()
        self._known: dict[int, OrderedDict[bytes, None]] = {}

    def packed(self, function: Any) -> SentFunction:
        """Return a function as bytes.

        A plain function is packed at its first use: what it captures keeps the values of that time. Methods and
        other callables are packed at each use.

        Raises
        ------
        TypeError
            If it cannot be sent. The message names what it captures that cannot.
        """
        plain = isinstance(function, FunctionType)
        if plain and function in self._packed:
            return self._packed[function]
        try:
            packed, references = pack(function, copy=True)
        except TypeError as error:
            raise TypeError(f"{_name_of(function)} cannot be sent{_culprit(function)}: {error}") from error
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
        self._unpacked: set[tuple[int, bytes]] = set()

    def keep(self, letter: Letter) -> None:
        """Keep the function of a letter."""
        digest, forget = letter.head
        if forget is not None:
            self._functions.pop((letter.source, forget), None)
            self._unpacked.discard((letter.source, forget))
        self._functions[letter.source, digest] = letter.body

    def function(self, source: int, digest: bytes) -> Any:
        """Return a function, which is unpacked at its first use."""
        key = source, digest
        if key not in self._unpacked:
            self._functions[key] = unpack(self._functions[key])
            self._unpacked.add(key)
        return self._functions[key]


def _name_of(function: Any) -> str:
    return f"function {getattr(function, '__qualname__', None) or repr(function)}"


def _culprit(function: Any) -> str:
    """Return the name that a function captures and that cannot be sent, in words."""
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        return ""
    code = function.__code__
    captured: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            captured[name] = cell.cell_contents
        except ValueError:  # a cell that is not filled yet
            continue
    captured |= {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    for name, value in captured.items():
        try:
            pack(value)
        except TypeError:
            return f", because of {name!r}, a {type(value).__name__} that it captures"
    return ""
