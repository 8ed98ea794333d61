"""Readers of one environment variable, with errors that name the variable."""

from __future__ import annotations

import os
from collections.abc import Mapping

_MOST_DIGITS = 18


def required(environ: Mapping[str, str], name: str, where: str) -> str:
    """Return the value of a variable that must be set.

    Raise RuntimeError if the variable is not set, or empty. The message ends in ``where``: where the variable is set.
    """
    value = environ.get(name, "")
    if not value:
        raise RuntimeError(f"the environment variable {name} is {'empty' if name in environ else 'not set'}: {where}")
    return value


def integer(environ: Mapping[str, str], name: str) -> int | None:
    """Return the value of a variable as a number, or None if it is not set or empty.

    Raise ValueError if the value is not a number from 0 on, or has more than 18 digits.
    """
    value = environ.get(name, "")
    if not value:
        return None
    if not (value.isascii() and value.isdecimal() and len(value) <= _MOST_DIGITS):
        raise ValueError(f"the environment variable {name} must be a number from 0 on, not {value!r:.60}")
    return int(value)


def first_of(environ: Mapping[str, str], names: tuple[str, ...]) -> tuple[int | None, str]:
    """Return the number in the first variable that is set, and its name; ``(None, "")`` without one.

    Raise ValueError if the value is not a number from 0 on.
    """
    for name in names:
        value = integer(environ, name)
        if value is not None:
            return value, name
    return None, ""


def own_host() -> str:
    """Return the name of this machine."""
    return os.uname().nodename


def position_of(host: str | None, nodes: tuple[str, ...]) -> int | None:
    """Return the index of the node of this name, in full or up to the first dot, or None if it is not there.

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
