"""Nested structures: mappings, lists, tuples, classes derived from these, dataclasses and None, through optree.

None is part of the structure, not a leaf: programs written for ``tf.nest`` use None for a missing gradient.
"""

from __future__ import annotations

import dataclasses
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, NamedTuple

IN_A_LIST = "in a list"
_FLAT: dict[type, str] = {list: IN_A_LIST, tuple: "in a tuple"}
_EMPTY: dict[type, str] = {list: "in an empty list", tuple: "in an empty tuple"}
_ADDRESS = re.compile(" at 0x[0-9a-f]+")
_NAMESPACE = "mpistrat"
# Classes that optree knows by itself, and those that were registered with it.
_registered: set[type] = {dict, list, tuple, OrderedDict, defaultdict}


class Parts(NamedTuple):
    """The parts of a structure. ``rebuild`` builds it from new leaves.

    ``form`` is its description: keys, lengths, places of None. Equal structures have equal forms on all ranks. A leaf
    has None.
    """

    leaves: list[Any]
    rebuild: Callable[[list[Any]], Any]
    form: str | None


def is_nested(value: Any) -> bool:
    """Return whether ``value`` is a structure, not a leaf."""
    kind: Any = type(value)
    return _is_structure(kind)


@lru_cache(maxsize=4096)  # bounded: a cache keeps the classes alive
def _is_structure(kind: Any) -> bool:
    return issubclass(kind, (dict, list, tuple, type(None), Mapping)) or _is_dataclass(kind)


def flatten(structure: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the leaves of a structure, and the function that builds the structure from new leaves.

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
    if _is_flat(structure):
        return list(structure), type(structure)
    leaves, spec = _flatten_nested(structure)
    return leaves, _builder(spec)


def take_apart(structure: Any) -> Parts:
    """Return the leaves of a structure, the function that rebuilds it, and its form.

    Examples
    --------
    >>> take_apart({"a": 1, "b": [2]}).form
    "in {'a': *, 'b': [*]}"
    >>> take_apart([1, 2]).form, take_apart(()).form, take_apart(1).form
    ('in a list', 'in an empty tuple', None)
    """
    if not is_nested(structure):
        return Parts([structure], _only, None)
    if _is_flat(structure):
        kind = type(structure)
        return Parts(list(structure), kind, (_FLAT if structure else _EMPTY)[kind])
    leaves, spec = _flatten_nested(structure)
    words = str(spec)[len("PyTreeSpec(") : -1].removesuffix(f", namespace={_NAMESPACE!r}")
    if " at 0x" in words:  # a defaultdict's factory: the address differs between processes
        words = _ADDRESS.sub("", words)
    return Parts(leaves, _builder(spec), f"in {words}")


def paths(structure: Any) -> list[tuple[Any, ...]]:
    """Return the keys, field names and positions that lead to each leaf, in the order of `flatten`.

    Examples
    --------
    >>> paths({"a": 1, "b": [2, None, 3]})
    [('a',), ('b', 0), ('b', 2)]
    """
    if _is_flat(structure):
        return [(index,) for index in range(len(structure))]
    import optree

    _register_classes(structure)
    return optree.tree_paths(structure, namespace=_NAMESPACE)


def holds(leaves: list[Any], kind: type) -> bool:
    """Return whether a leaf is an instance of ``kind``."""
    return any(issubclass(leaf_type, kind) for leaf_type in set(map(type, leaves)))


def map_structure(fn: Callable[..., Any], structure: Any, *others: Any) -> Any:
    """Return the structure of the results of ``fn`` on the leaves of one structure, or of several equal ones.

    Raise ValueError if the structures differ.
    """
    if not is_nested(structure) and not any(map(is_nested, others)):
        return fn(structure, *others)
    import optree

    for tree in (structure, *others):
        _register_classes(tree)
    specs = {optree.tree_structure(tree, namespace=_NAMESPACE) for tree in (structure, *others)}
    if len(specs) > 1:  # optree would accept deeper structures in ``others``
        raise ValueError(f"the structures differ: {', '.join(map(str, specs))}")
    return optree.tree_map(fn, structure, *others, namespace=_NAMESPACE)


def _is_flat(structure: Any) -> bool:
    """Return whether a structure is a list or a tuple of leaves."""
    return type(structure) in _FLAT and not any(map(_is_structure, set(map(type, structure))))


def _flatten_nested(structure: Any) -> tuple[list[Any], Any]:
    import optree

    _register_classes(structure)
    return optree.tree_flatten(structure, namespace=_NAMESPACE)


def _builder(spec: Any) -> Callable[[list[Any]], Any]:
    import optree

    return partial(optree.tree_unflatten, spec)


def _only(leaves: list[Any]) -> Any:
    (leaf,) = leaves
    return leaf


def _is_dataclass(kind: type) -> bool:
    # A dataclass that sets _mpistrat_leaf, such as the description of an array, is a leaf.
    return hasattr(kind, "__dataclass_fields__") and not getattr(kind, "_mpistrat_leaf", False)


def _register_classes(value: Any) -> None:
    """Register the classes in a structure that optree does not know: dataclasses and derived classes."""
    kind = type(value)
    if isinstance(value, Mapping):
        children = list(value.values())
    elif isinstance(value, (list, tuple)):
        children = list(value)
    elif _is_dataclass(kind):
        children = [getattr(value, f.name) for f in dataclasses.fields(value)]
    else:
        return
    if kind not in _registered:
        _register(kind)
    for child in children:
        _register_classes(child)


def _register(kind: type) -> None:
    import optree

    known = optree.is_namedtuple_class(kind) or optree.is_structseq_class(kind)
    if issubclass(kind, Mapping):
        optree.register_pytree_node(kind, _dict_to_children, partial(_dict_of, kind), namespace=_NAMESPACE)
    elif issubclass(kind, (list, tuple)) and not known:
        optree.register_pytree_node(
            kind, lambda value: (list(value), None), lambda _, children: kind(children), namespace=_NAMESPACE
        )
    elif not known:
        _register_dataclass(kind)
    _registered.add(kind)


def _dict_to_children(value: Any) -> tuple[list[Any], tuple[Any, ...], tuple[Any, ...]]:
    keys = tuple(value)
    if not isinstance(value, OrderedDict):
        with suppress(TypeError):  # one order on all ranks; optree sorts the keys of a plain dict
            keys = tuple(sorted(keys, key=lambda key: (type(key).__qualname__, key)))
    return [value[key] for key in keys], keys, keys


def _dict_of(kind: Any, keys: Any, children: Any) -> Any:
    content = dict(zip(keys, children, strict=True))
    try:
        return kind(content)
    except TypeError as error:
        raise TypeError(
            f"a {kind.__name__} cannot be made of a dict ({error}): use a dict, or a mapping that takes one"
        ) from error


def _register_dataclass(kind: Any) -> None:
    import optree

    names = tuple(f.name for f in dataclasses.fields(kind))

    def to_children(value: Any) -> tuple[list[Any], None, tuple[str, ...]]:
        return [getattr(value, name) for name in names], None, names

    def from_children(_: Any, children: Any) -> Any:
        # Neither __init__ nor __post_init__ runs: they may reject a leaf, which can have any type here.
        instance: Any = object.__new__(kind)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(instance, name, child)
        return instance

    optree.register_pytree_node(kind, to_children, from_children, namespace=_NAMESPACE)
