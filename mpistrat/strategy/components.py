"""The components of distributed values that a replica function gets as arguments."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrat import nest
from mpistrat.runtime import arrays
from mpistrat.values import DistributedValues, component
from mpistrat.variables import Variable

_ONLY_ARRAYS = {np.ndarray}
_UNCHANGED = arrays.NUMBERS | {np.ndarray, str, bool}


def components(tree: Any) -> Any:
    """Return a structure with this replica's components in place of distributed values."""
    return _map(component, tree)


def components_but_variables(tree: Any) -> Any:
    """Return a structure as `components` does, but leave variables unchanged."""
    kind = type(tree)
    if kind in _UNCHANGED or (kind is tuple and set(map(type, tree)) == _ONLY_ARRAYS):
        return tree  # fast path: a number, or a batch
    return _map(_unless_variable, tree)


def _unless_variable(value: Any) -> Any:
    if isinstance(value, DistributedValues) and not isinstance(value, Variable):
        return component(value)
    return value


def _map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree of the results, or the tree itself if no leaf changes, so that the program may write to it."""
    if not nest.is_nested(tree):
        return fn(tree)
    leaves, rebuild = nest.flatten(tree)
    others = [*map(fn, leaves)]
    return tree if all(map(operator.is_, leaves, others)) else rebuild(others)
