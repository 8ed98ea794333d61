"""Hashable references to variables, which compare by identity."""

from __future__ import annotations

from typing import Generic, TypeVar

_Variable = TypeVar("_Variable")


class Reference(Generic[_Variable]):
    """A hashable reference to a variable, for dicts and sets: ``==`` of variables compares elements.

    `Variable.ref` returns it. It keeps the variable alive.
    """

    __slots__ = ("_variable",)

    def __init__(self, variable: _Variable):
        self._variable = variable

    def deref(self) -> _Variable:
        """Return the variable."""
        return self._variable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reference) and self._variable is other._variable

    def __hash__(self) -> int:
        return id(self._variable)

    def __repr__(self) -> str:
        return f"<Reference to {self._variable!r}>"
