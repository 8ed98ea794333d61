"""Nested structures: dicts, lists, tuples, namedtuples, dataclasses and None, through optree.

None is part of the structure, as in ``tf.nest`` users' programs a missing gradient is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any

_NAMESPACE = "mpistrat"
_registered: set[type] = set()


def is_nested(value: Any) -> bool:
    """Whether ``value`` is a structure rather than a leaf."""
    kind: Any = type(value)
    return _is_structure(kind)


@lru_cache(maxsize=4096)
def _is_structure(kind: Any) -> bool:
    return issubclass(kind, (dict, list, tuple, type(None))) or _is_dataclass(kind)


def flatten(structure: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The leaves of a structure, and the function that builds the structure from new leaves.

    Examples
    --------
    >>> leaves, rebuild = flatten({"a": 1, "b": [2, None]})
    >>> leaves
    [1, 2]
    >>> rebuild([10, 20])
    {'a': 10, 'b': [20, None]}
    """
    if not is_nested(structure):
        return [structure], _only
    if type(structure) in (list, tuple) and not any(map(_is_structure, set(map(type, structure)))):
        return list(structure), type(structure)
    import optree

    _register_dataclasses(structure)
    leaves, spec = optree.tree_flatten(structure, namespace=_NAMESPACE)

    def rebuild(new: list[Any]) -> Any:
        return optree.tree_unflatten(spec, new)

    return leaves, rebuild


def describe(structure: Any) -> str | None:
    """A structure in words, None for a leaf or a list of leaves.

    Examples
    --------
    >>> describe({"a": 1, "b": [2]})
    "PyTreeSpec({'a': *, 'b': [*]})"
    """
    if not is_nested(structure):
        return None
    if type(structure) in (list, tuple) and not any(map(_is_structure, set(map(type, structure)))):
        return None
    import optree

    _register_dataclasses(structure)
    return str(optree.tree_structure(structure, namespace=_NAMESPACE))


def holds(leaves: list[Any], kind: type) -> bool:
    """Whether one of the leaves is an instance of a class."""
    return any(issubclass(each, kind) for each in set(map(type, leaves)))


def map_structure(fn: Callable[..., Any], structure: Any, *others: Any) -> Any:
    """``fn`` applied to the leaves of one structure or, side by side, of several equal ones.

    Raises
    ------
    ValueError
        If the structures differ.
    """
    if not is_nested(structure) and not any(map(is_nested, others)):
        return fn(structure, *others)
    import optree

    for each in (structure, *others):
        _register_dataclasses(each)
    specs = {optree.tree_structure(each, namespace=_NAMESPACE) for each in (structure, *others)}
    if len(specs) > 1:  # optree takes others that are deeper
        raise ValueError(f"the structures differ: {', '.join(map(str, specs))}")
    return optree.tree_map(fn, structure, *others, namespace=_NAMESPACE)


def _only(leaves: list[Any]) -> Any:
    (leaf,) = leaves
    return leaf


def _is_dataclass(kind: type) -> bool:
    # A frozen description (a spec, say) that opts out is a leaf.
    return hasattr(kind, "__dataclass_fields__") and not getattr(kind, "_mpistrat_leaf", False)


def _register_dataclasses(value: Any) -> None:
    if isinstance(value, dict):
        children = list(value.values())
    elif isinstance(value, (list, tuple)):
        children = list(value)
    elif _is_dataclass(type(value)):
        children = [getattr(value, f.name) for f in dataclasses.fields(value)]
        if type(value) not in _registered:
            _register(type(value))
    else:
        return
    for child in children:
        _register_dataclasses(child)


def _register(kind: type) -> None:
    import optree

    names = tuple(f.name for f in dataclasses.fields(kind))

    def to_children(value: Any) -> tuple[list[Any], None, tuple[str, ...]]:
        return [getattr(value, name) for name in names], None, names

    def from_children(_: Any, children: Any) -> Any:
        # Neither __init__ nor __post_init__ runs: a leaf may be anything here.
        made: Any = object.__new__(kind)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(made, name, child)
        return made

    optree.register_pytree_node(kind, to_children, from_children, namespace=_NAMESPACE)
    _registered.add(kind)
