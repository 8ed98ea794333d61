"""The names of saved variables and arrays: their paths in a structure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from mpistrat import nest
from mpistrat.arrays import arrays
from mpistrat.data import Block
from mpistrat.mesh import ShardedArray
from mpistrat.strategy import Variable
from mpistrat.training.checkpoint.format import OF_REPLICAS
from mpistrat.values import PerReplica
from mpistrat.variables import CutVariable

_NUMBERS = (bool, int, float, complex)


class PerRank:
    """Arrays that each rank has of its own, or with ``by_replica`` each of its replicas."""

    __slots__ = ("by_replica", "values")

    def __init__(self, values: tuple[Any, ...], by_replica: bool):
        self.values, self.by_replica = values, by_replica


class ArrayBlock(NamedTuple):
    """This rank's boxes of an array that the ranks hold together."""

    dtype: np.dtype
    shape: tuple[int, ...]
    blocks: Sequence[Block]


@runtime_checkable
class Sharded(Protocol):
    """A variable, the state of an optimizer, whose parts are on ``len(ends) - 1`` ranks."""

    ends: Sequence[int]

    def blocks(self) -> Sequence[Block]:
        """Return this rank's part as boxes of the whole, which are views."""


def extract_parts(
    named: dict[str, Any],
    parts: dict[str, PerRank | ArrayBlock],
    ranks: int,
    able: Callable[[], bool],
    reads: bool = False,
) -> None:
    """Move arrays that are cut or sharded over ``ranks`` ranks to ``parts``: each rank writes or reads its own.

    If not all ranks are ``able`` to, sharded variables stay, and are gathered. Collective if ``able`` is. Of ranks with
    equal parts of a cut array all read, and the first one writes.
    """
    for name, leaf in [*named.items()]:
        if isinstance(leaf, (CutVariable, ShardedArray)):
            local = leaf.own_copy() if isinstance(leaf, CutVariable) else leaf.local
            offset = [indices.start for indices in leaf.layout.box(leaf.mesh)]
            has = reads or leaf.layout.is_first(leaf.mesh, leaf.mesh.rank)
            parts[name] = ArrayBlock(leaf.dtype, leaf.shape, [Block(local, offset, leaf.shape)] if has else [])
            del named[name]
    # hasattr first: `isinstance` of a protocol takes 20 us, which is 4 ms for 200 variables.
    leaves = ((name, leaf) for name, leaf in named.items() if hasattr(type(leaf), "blocks"))
    shared = [name for name, leaf in leaves if isinstance(leaf, Sharded) and len(leaf.ends) == ranks + 1]
    if not shared or not able():
        return
    for name in shared:
        leaf = named.pop(name)
        parts[name] = ArrayBlock(leaf.dtype, leaf.shape, leaf.blocks())


def named(state: Any) -> dict[str, Any]:
    """Return the leaves of a structure by their names, in the order of `mpistrat.nest.flatten`.

    A name is the path to a leaf: keys of mappings, names of fields and positions in sequences, with "/" between them. A
    variable in a sequence has its own name in place of its position.

    Raise TypeError if the structure is a leaf, or a leaf is neither a variable, an array nor a number. Raise ValueError
    if there are no leaves, or two of them cannot be in one file under their names.

    Examples
    --------
    >>> named({"step": 3, "layers": [{"w": 0.5}, {"w": 1.5}]})
    {'layers/0/w': 0.5, 'layers/1/w': 1.5, 'step': 3}
    """
    if not nest.is_nested(state):
        raise TypeError(f"give variables and arrays in a list or a dict, not {_described(state)} alone")
    leaves = nest.flatten(state)[0]
    if not leaves:
        raise ValueError("there are no variables and no arrays")
    by_name: dict[str, Any] = {}
    seen: dict[tuple[str, ...], str] = {}
    for path, leaf in zip(nest.paths(state), leaves, strict=True):
        keys = [str(key) for key in path]
        if isinstance(leaf, Variable) and isinstance(path[-1], int):
            keys[-1] = leaf.name
        name = "/".join(keys)
        _require_storable(leaf, name)
        # As HDF5 reads it: "/a//./b" is "a/b".
        hdf5_path = tuple(part for part in name.split("/") if part not in ("", "."))
        if not hdf5_path or "\0" in name or hdf5_path[0] + "/" == OF_REPLICAS:
            raise ValueError(f"{name!r} cannot be the name of a variable in a file: give a dict with names of your own")
        if hdf5_path in seen:
            both = repr(name) if name == seen[hdf5_path] else f"{seen[hdf5_path]!r} or {name!r}"
            raise ValueError(f"two variables have the name {both}: give a dict with names of your own")
        by_name["/".join(hdf5_path)], seen[hdf5_path] = leaf, name
    for hdf5_path, name in seen.items():
        # HDF5 cannot have a group and a dataset of one name.
        for above in (hdf5_path[:i] for i in range(1, len(hdf5_path))):
            if above in seen:
                raise ValueError(
                    f"the names {seen[above]!r} and {name!r} cannot both be in a file: one is in the other's group; "
                    "give a dict with names of your own"
                )
    return by_name


def split_leaves(state: Any, own: Any) -> tuple[dict[str, Any], dict[str, PerRank | ArrayBlock]]:
    """Return the leaves that are equal on all ranks, and this rank's own parts: ``own``, blocks and PerReplica values.

    Raise TypeError and ValueError as `named`, and TypeError for a variable in ``own``.
    """
    structure = as_structure(state)
    leaves = named(structure) if own is None or nest.flatten(structure)[0] else {}
    for name, leaf in ({} if own is None else named(own)).items():
        if isinstance(leaf, Variable):
            raise TypeError(f"own has {name!r}, a variable: the strategy knows its values, so give it in the state")
        if name in leaves:
            raise ValueError(f"{name!r} is in the state and in own: give it another name")
        leaves[name] = leaf if isinstance(leaf, (Block, PerReplica)) else PerRank((leaf,), False)
    if own is not None:
        named(leaves)  # names that cannot be in one file
    parts: dict[str, PerRank | ArrayBlock] = {}
    for name, leaf in leaves.items():
        if isinstance(leaf, Block):
            parts[name] = ArrayBlock(leaf.dtype, leaf.global_shape, [leaf])
        elif isinstance(leaf, (PerReplica, PerRank)):
            parts[name] = PerRank(leaf.values, True) if isinstance(leaf, PerReplica) else leaf
    return {name: leaf for name, leaf in leaves.items() if name not in parts}, parts


def as_structure(state: Any) -> Any:
    """Return variables as a structure: the list of another iterable, such as a generator."""
    # Arrays and texts are iterable, too, but they are leaves.
    is_array = isinstance(state, Variable) or hasattr(state, "shape") or isinstance(state, (str, bytes))
    return state if nest.is_nested(state) or is_array or not isinstance(state, Iterable) else list(state)


def named_variables(state: Any) -> dict[str, Variable]:
    """Return the variables of a structure as `named`. Raise TypeError for any other leaf."""
    leaves = named(as_structure(state))
    for name, leaf in leaves.items():
        if not isinstance(leaf, Variable):
            raise TypeError(
                f"{name!r} is {_described(leaf)}, not a Variable: make mpistrat.Variable of arrays in the scope of a "
                "strategy"
            )
    return leaves


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by name as nested dicts, as HDF5 has groups.

    Examples
    --------
    >>> nested({"a/b": 1, "a/c": 2, "d": 3})
    {'a': {'b': 1, 'c': 2}, 'd': 3}
    """
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *groups, last = name.split("/")
        inner = tree
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[last] = value
    return tree


def refuse_own(leaves: Mapping[str, Any]) -> None:
    """Raise TypeError if one of these is a rank's own."""
    for name, leaf in leaves.items():
        if isinstance(leaf, (Block, PerReplica)):
            raise TypeError(
                f"{name!r} is {_described(leaf)}: load() fills it, and a result without `like` has all parts"
            )


def require_fillable(leaves: Mapping[str, Any], own: Mapping[str, PerRank | ArrayBlock] = {}) -> None:
    """Raise TypeError if one of these is neither a variable nor an array that can be changed."""
    parts = [
        (name, value)
        for name, part in own.items()
        for value in ([block.array for block in part.blocks] if isinstance(part, ArrayBlock) else part.values)
    ]
    for name, leaf in [*leaves.items(), *parts]:
        if not isinstance(leaf, (Variable, ShardedArray)) and not arrays.can_be_filled(leaf):
            raise TypeError(
                f"{name!r} is {_described(leaf)}, which cannot be changed: use load_arrays(path, like), which returns "
                "a new structure"
            )


def _require_storable(leaf: Any, name: str) -> None:
    if isinstance(leaf, (Block, PerReplica, PerRank)):
        for value in (leaf.array,) if isinstance(leaf, Block) else leaf.values:
            _require_storable(value, name)
        return
    if isinstance(leaf, Variable) and (leaf.dtype.kind in "biufcS" or leaf.dtype.name == "bfloat16"):
        return
    if isinstance(leaf, _NUMBERS) or hasattr(leaf, "__array__") or hasattr(leaf, "__dlpack__"):
        arrays.refuse_masked(leaf)
        dtype = leaf.dtype if hasattr(leaf, "dtype") else arrays.dtype_and_shape(leaf)[0]
        if getattr(dtype, "kind", "f") in "biufc" or str(dtype) == "bfloat16":
            return
    raise TypeError(
        f"{name!r} is {_described(leaf)}, not a variable, an array of numbers or a number; fix: save times as "
        "astype('i8'), float8 as view('u1'), records by field, and strings elsewhere"
    )


def _described(thing: Any) -> str:
    """Return the type of an object, and the shape of an array, without its content."""
    kind = f"{type(thing).__module__}.{type(thing).__qualname__}".removeprefix("builtins.")
    shape = getattr(thing, "shape", None)
    dtype = getattr(thing, "dtype", None)
    article = "an" if kind[0] in "aeio" else "a"
    return f"{article} {kind}" if shape is None else f"{article} {kind} of {dtype} and shape {tuple(shape)}"
