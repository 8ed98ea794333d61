"""Digests of functions and arguments, by which another process tells whether it has the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import xxhash

from mpistrat.messages.pickling import captured

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def fingerprint(value: Any, module: str | None = None) -> str:
    """Return a digest of a function or arguments that is the same in every process, unlike a pickle's.

    Functions of ``module`` count by code and captured values, others by name. Raise TypeError if it cannot be compared.
    """
    digest = xxhash.xxh3_128()
    try:
        _feed(digest, value, module, {})
    except RecursionError:
        raise TypeError(
            f"a {type(value).__name__} that contains itself, or is nested too deeply, has no digest"
        ) from None
    return str(digest.hexdigest())


def _feed(digest: Any, value: Any, module: str | None, functions: dict[int, int]) -> None:
    kind = type(value)
    digest.update(f"({kind.__module__}.{kind.__qualname__} ".encode())
    if kind in _PLAIN:
        digest.update((hex(value) if kind is int and value.bit_length() > 64 else repr(value)).encode())
    elif kind is np.ndarray and value.dtype.kind != "O":
        digest.update(f"{value.dtype if value.dtype.kind == 'V' else value.dtype.str} {value.shape}".encode())
        digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
    elif kind is FunctionType and id(value) in functions:  # it calls itself
        digest.update(str(functions[id(value)]).encode())
    elif kind in (set, frozenset):  # their order differs from process to process
        digest.update("".join(sorted(fingerprint(item, module) for item in value)).encode())
    else:
        if kind is FunctionType:
            functions[id(value)] = len(functions)
        for item in _parts(value, module):
            _feed(digest, item, module, functions)
    digest.update(b")")


def _parts(value: Any, module: str | None) -> Iterator[Any]:
    if isinstance(value, ModuleType):
        yield value.__name__
    elif isinstance(value, (type, BuiltinFunctionType)):
        yield from (value.__module__, value.__qualname__)
    elif isinstance(value, (FunctionType, MethodType)):
        yield value.__qualname__
        if value.__module__ not in (module, "__main__"):
            yield value.__module__
            return
        yield value.__code__
        for pair in captured(value):
            yield from pair
    elif isinstance(value, CodeType):
        yield from (value.co_code, value.co_names, *value.co_consts)
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, (list, tuple)):
        yield from value
    elif isinstance(value, dict):
        for pair in value.items():
            yield from pair
    else:
        reduced = value.__reduce_ex__(4)
        for item in [reduced] if isinstance(reduced, str) else reduced:
            yield [*item] if isinstance(item, Iterator) else item
