"""Reading one variable of an environment, with errors that name it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TypeVar

Value = TypeVar("Value")
_MOST_DIGITS = 18


def required(environ: Mapping[str, str], name: str, where: str) -> str:
    """The value of a variable.

    Raises
    ------
    RuntimeError
        If it is not set, or empty. ``where`` says where it would be.
    """
    value = environ.get(name, "")
    if not value:
        raise RuntimeError(
            f"the environment variable {name} is {'empty' if name in environ else 'not set'}: {where}"
        )
    return value


def integer(environ: Mapping[str, str], name: str) -> int | None:
    """The value of a variable as a number, None if it is not set or empty.

    Raises
    ------
    ValueError
        If it is no number from 0 on, or one that counts nothing there is.
    """
    value = environ.get(name, "")
    if not value:
        return None
    if not (value.isascii() and value.isdecimal() and len(value) <= _MOST_DIGITS):
        raise ValueError(f"the environment variable {name} must be a number from 0 on, not {value!r:.60}")
    return int(value)


def parsed(environ: Mapping[str, str], name: str, parse: Callable[[str], Value]) -> Value | None:
    """The value of a variable as ``parse`` reads it, None if it is not set or empty.

    Raises
    ------
    ValueError
        If ``parse`` does: the text names the variable.
    """
    value = environ.get(name, "")
    if not value:
        return None
    try:
        return parse(value)
    except ValueError as error:
        raise ValueError(f"the environment variable {name} cannot be read: {error}") from None


def first_of(environ: Mapping[str, str], names: tuple[str, ...]) -> tuple[int | None, str]:
    """The number in the first of these variables that is set, and its name; ``(None, "")`` if none is.

    Raises
    ------
    ValueError
        If it is no number from 0 on.
    """
    for name in names:
        value = integer(environ, name)
        if value is not None:
            return value, name
    return None, ""


def own_host() -> str:
    """The name of this machine."""
    return os.uname().nodename


def position_of(host: str | None, nodes: tuple[str, ...]) -> int | None:
    """Which of the nodes has this name, written in full or up to its first dot; None if none has.

    Examples
    --------
    >>> position_of("b.cluster.org", ("a", "b"))
    1
    """
    if host is None:
        return None
    if host in nodes:
        return nodes.index(host)
    short = [node.partition(".")[0] for node in nodes]
    name = host.partition(".")[0]
    return short.index(name) if short.count(name) == 1 else None
