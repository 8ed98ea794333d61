"""The components of distributed values that a replica function gets, and how what it returns becomes distributed.

The values of several replicas of a rank become one as ``tf.distribute`` regroups those of its devices.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat import nest
from mpistrat.arrays import arrays
from mpistrat.values import DistributedValues, PerReplica, component, snapshot
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


def regrouped(values: Sequence[Any], *, always: bool = False) -> Any:
    """Return the structure of the values of this rank's replicas, with a `PerReplica` for each leaf.

    Unless ``always``, a leaf that is the same object on all of them is not wrapped, such as those of a single replica.
    Raise ValueError if the structures differ.
    """
    first = values[0]
    if not any(map(nest.is_nested, values)):
        return _one(values, always)
    without = [each is None for each in values]
    if any(without):
        return None if all(without) else PerReplica(tuple(values))
    leaves, rebuild, form = nest.take_apart(first)
    parts = [leaves]
    for each in values[1:]:
        found = nest.take_apart(each)
        if found.form != form or len(found.leaves) != len(leaves):
            raise ValueError(
                f"a replica returns {len(found.leaves)} value(s) {found.form or ''}, and the first one of its rank "
                f"{len(leaves)} {form or ''}: their structures must be equal"
            )
        parts.append(found.leaves)
    return rebuild([_one(leaf, always) for leaf in zip(*parts, strict=True)])


def _one(values: Sequence[Any], always: bool) -> Any:
    first = values[0]
    if always or not all(each is first for each in values):
        return PerReplica(tuple(values))
    return first


def apart(tree: Any) -> Any:
    """Return a structure with copies of its arrays, which the next replica may write to."""
    leaves, rebuild = nest.flatten(tree)
    return rebuild([_kept(leaf) for leaf in leaves]) if leaves else tree


def _kept(leaf: Any) -> Any:
    return leaf if isinstance(leaf, Variable) else snapshot(leaf)
