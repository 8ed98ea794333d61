"""How objects and groups of ranks show themselves, in a line or a table, and how arguments are refused."""

from __future__ import annotations

import html
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def text(kind: str, facts: Mapping[str, Any]) -> str:
    """Return ``<kind name=value ...>``.

    Examples
    --------
    >>> text("SGD", {"learning_rate": 0.5, "steps": 3})
    '<SGD learning_rate=0.5 steps=3>'
    """
    return f"<{' '.join([kind, *(f'{name}={_shown(value)}' for name, value in facts.items())])}>"


def table(kind: str, facts: Mapping[str, Any]) -> str:
    """Return an HTML table with a row for each fact, for ``_repr_html_``."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:left'>{html.escape(_shown(value))}</td></tr>"
        for name, value in facts.items()
    )
    return f"<table><caption><b>{html.escape(kind)}</b></caption><tbody>{rows}</tbody></table>"


def other_than_default(kind: type, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a class that differ from the defaults of its constructor."""
    parameters = inspect.signature(kind).parameters
    return {
        name: value for name, value in config.items() if name not in parameters or parameters[name].default != value
    }


def require(is_valid: object, text: str, value: object) -> None:
    """Raise ValueError unless an argument is valid. The ``text`` says what it must be, and the error ends in its value.

    >>> require(2 <= 3, "momentum must be below 1", 2)
    """
    if not is_valid:
        raise ValueError(f"{text}, not {value!r}")


def few(texts: Sequence[str], most: int, between: str = ", ") -> str:
    """Return the first ``most`` texts, and dots where there are more.

    >>> few(["a", "b", "c"], 2)
    'a, b, ...'
    """
    return between.join([*texts[:most], *["..."] * (len(texts) > most)])


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else getattr(value, "__name__", None) or repr(value)


def grouped(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """Return the values of each key, such as the ranks that report a text, in the order in which they come.

    >>> grouped([("a", 0), ("b", 1), ("a", 2)])
    {'a': [0, 2], 'b': [1]}
    """
    groups: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def ranges(numbers: Iterable[int], between: str = ",") -> str:
    """Return cores, or other numbers, as text.

    >>> ranges({0, 1, 2, 5})
    '0-2,5'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return between.join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
