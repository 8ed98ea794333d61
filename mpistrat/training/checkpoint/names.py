"""The names in a file of what is saved: of variables and arrays in a structure, and of the objects of a checkpoint."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from mpistrat import nest
from mpistrat.arrays import arrays, json_arrays
from mpistrat.data import Block
from mpistrat.mesh import ShardedArray
from mpistrat.strategy import Variable
from mpistrat.training.checkpoint.format import OF_REPLICAS
from mpistrat.values import PerReplica
from mpistrat.variables import CutVariable

_NUMBERS = (bool, int, float, complex)


class PerRank:
    """Arrays of which each rank has others. ``by_replica`` says whether they are those of its replicas."""

    __slots__ = ("by_replica", "values")

    def __init__(self, values: tuple[Any, ...], by_replica: bool):
        self.values, self.by_replica = values, by_replica


class ArrayBlock(NamedTuple):
    """What this rank holds of an array to which the ranks give boxes."""

    dtype: np.dtype
    shape: tuple[int, ...]
    blocks: Sequence[Block]


@runtime_checkable
class Sharded(Protocol):
    """A variable of which each of ``len(ends) - 1`` ranks holds a part: state of an optimizer."""

    ends: Sequence[int]

    def blocks(self) -> Sequence[Block]:
        """Return this rank's part as boxes of the whole, which are views."""


def share_out(
    named: dict[str, Any],
    parts: dict[str, PerRank | ArrayBlock],
    ranks: int,
    able: Callable[[], bool],
    reads: bool = False,
) -> None:
    """Move what is cut, and variables shared out over so many ranks, to the parts: each rank writes or reads its own.

    If not all ranks are ``able`` to, variables stay that are shared out: they are gathered. Collective if ``able`` is.
    Of ranks with equal parts of what is cut, all of them read, and the first one writes.
    """
    for name, leaf in [*named.items()]:
        if isinstance(leaf, (CutVariable, ShardedArray)):
            mine = leaf.own_copy() if isinstance(leaf, CutVariable) else leaf.local
            offset = [each.start for each in leaf.layout.box(leaf.mesh)]
            has = reads or leaf.layout.is_first(leaf.mesh, leaf.mesh.rank)
            parts[name] = ArrayBlock(leaf.dtype, leaf.shape, [Block(mine, offset, leaf.shape)] if has else [])
            del named[name]
    # Its type is asked first: `isinstance` of a protocol takes 20 us, which is 4 ms of 200 variables.
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
    found: dict[str, Any] = {}
    places: dict[tuple[str, ...], str] = {}
    for path, leaf in zip(nest.paths(state), leaves, strict=True):
        keys = [str(key) for key in path]
        if isinstance(leaf, Variable) and isinstance(path[-1], int):
            keys[-1] = leaf.name
        name = "/".join(keys)
        _require_storable(leaf, name)
        # As HDF5 reads it: "/a//./b" is "a/b".
        place = tuple(part for part in name.split("/") if part not in ("", "."))
        if not place or "\0" in name or place[0] + "/" == OF_REPLICAS:
            raise ValueError(f"{name!r} cannot be the name of a variable in a file: give a dict with names of your own")
        if place in places:
            both = repr(name) if name == places[place] else f"{places[place]!r} or {name!r}"
            raise ValueError(f"two variables have the name {both}: give a dict with names of your own")
        found["/".join(place)], places[place] = leaf, name
    for place, name in places.items():
        for above in (place[:i] for i in range(1, len(place))):
            if above in places:
                raise ValueError(
                    f"the names {places[above]!r} and {name!r} cannot both be in a file: one is in the other's group; "
                    "give a dict with names of your own"
                )
    return found


def divided(state: Any, own: Any) -> tuple[dict[str, Any], dict[str, PerRank | ArrayBlock]]:
    """Return by name what is the same on all ranks, and what is a rank's own: ``own``, blocks, and values PerReplica.

    Raise TypeError and ValueError as `named`, and TypeError for a variable in ``own``.
    """
    structure = as_structure(state)
    found = named(structure) if own is None or nest.flatten(structure)[0] else {}
    for name, leaf in ({} if own is None else named(own)).items():
        if isinstance(leaf, Variable):
            raise TypeError(f"own has {name!r}, a variable: the strategy knows its values, so give it in the state")
        if name in found:
            raise ValueError(f"{name!r} is in the state and in own: give it another name")
        found[name] = leaf if isinstance(leaf, (Block, PerReplica)) else PerRank((leaf,), False)
    if own is not None:
        named(found)  # names that cannot be in one file
    parts: dict[str, PerRank | ArrayBlock] = {}
    for name, leaf in found.items():
        if isinstance(leaf, Block):
            parts[name] = ArrayBlock(leaf.dtype, leaf.global_shape, [leaf])
        elif isinstance(leaf, (PerReplica, PerRank)):
            parts[name] = PerRank(leaf.values, True) if isinstance(leaf, PerReplica) else leaf
    return {name: leaf for name, leaf in found.items() if name not in parts}, parts


def as_structure(state: Any) -> Any:
    """Return variables as a structure: the list of another iterable, such as a generator."""
    is_array = isinstance(state, Variable) or hasattr(state, "shape") or isinstance(state, (str, bytes))
    if nest.is_nested(state) or is_array or not isinstance(state, Iterable):
        return state
    return list(state)


def named_variables(state: Any) -> dict[str, Variable]:
    """Return the variables of a structure as `named`. Raise TypeError for any other leaf."""
    found = named(as_structure(state))
    for name, leaf in found.items():
        if not isinstance(leaf, Variable):
            raise TypeError(
                f"{name!r} is {_described(leaf)}, not a Variable: make mpistrat.Variable of arrays in the scope of a "
                "strategy"
            )
    return found


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by name as nested dicts, as HDF5 has groups.

    Examples
    --------
    >>> nested({"a/b": 1, "a/c": 2, "d": 3})
    {'a': {'b': 1, 'c': 2}, 'd': 3}
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        *groups, last = name.split("/")
        inner = found
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[last] = value
    return found


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
        (name, each)
        for name, part in own.items()
        for each in ([block.array for block in part.blocks] if isinstance(part, ArrayBlock) else part.values)
    ]
    for name, leaf in [*leaves.items(), *parts]:
        if not isinstance(leaf, (Variable, ShardedArray)) and not arrays.can_be_filled(leaf):
            raise TypeError(
                f"{name!r} is {_described(leaf)}, which cannot be changed: use load_arrays(path, like), which returns "
                "a new structure"
            )


def _require_storable(leaf: Any, name: str) -> None:
    if isinstance(leaf, (Block, PerReplica, PerRank)):
        for each in (leaf.array,) if isinstance(leaf, Block) else leaf.values:
            _require_storable(each, name)
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


# --- the objects below a checkpoint ---------------------------------------------


_STATE = ".state"  # the last part of the name of a state, which no attribute has
# Methods that give and take the state of an object: of generators of torch, NumPy and Python, and of datasets.
_METHODS = (("get_state", "set_state"), ("getstate", "setstate"), ("state", "restore"))


class Stateful(NamedTuple):
    """An object whose state is not an array: an iterator, or a random generator.

    ``replicas`` is the number of replicas of this rank whose states it has in a list, None for an object that is not a
    PerReplica.
    """

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    replicas: int | None = None


_MARK = "\0"  # before the keys of what JSON would not give back as it was
_MOST_BITS = 1 << 12  # of an integer that is written in decimal digits

NameOf = Callable[[Variable], str]


@runtime_checkable
class HasVariables(Protocol):
    """An object that names its variables: an optimizer or a metric."""

    def named_variables(self, name_of: NameOf) -> Mapping[str, Variable]:
        """Return the variables by name. ``name_of`` gives the name of a variable that they belong to."""


@runtime_checkable
class Growing(Protocol):
    """An object below which variables may come later: an optimizer, at its first step, and a `Checkpoint`."""

    def when_grown(self, function: Callable[[], object]) -> None:
        """Call a function each time that variables have come, in cross-replica context on all ranks."""


@runtime_checkable
class Node(Protocol):
    """An object that names the objects below it: a `Checkpoint`."""

    def tracked(self) -> Mapping[str, Any]:
        """Return the objects below this one, by name."""


class Graph(NamedTuple):
    """What is saved of the objects below a checkpoint, by name, in the order of names.

    ``leaves`` are variables, and arrays that can be filled. ``own`` are states of arrays that each rank has for itself:
    what optimizers exchange between groups. Below the objects in ``growing`` variables may come later. ``wrong`` has
    the errors of objects that cannot be saved.
    """

    leaves: dict[str, Any]
    states: dict[str, Stateful]
    own: dict[str, Stateful]
    growing: list[Growing]
    wrong: list[Exception]

    def check(self) -> None:
        """Raise TypeError for an object that cannot be saved, ValueError for two of one name, as of keys 1 and "1"."""
        for error in self.wrong:
            raise error


def graph_of(root: Node) -> Graph:
    """Return what is saved of the objects below ``root``. One that is met again keeps its first name."""
    graph = Graph({}, {}, {}, [], [])
    met: dict[int, Any] = {}  # keeps the objects, so that no other gets the identity of one
    owners: list[tuple[str, HasVariables]] = []
    _walk("", root, graph, met, owners)
    # After all others: the slots of an optimizer are named after the variables that they belong to.
    names = {id(leaf): name for name, leaf in graph.leaves.items()}
    for name, owner in owners:
        try:
            variables = owner.named_variables(lambda each: names.get(id(each)) or _escaped(each.name))
            for part, variable in variables.items():
                _add(graph, met, _below(name, part), variable)
        except ValueError as error:
            graph.wrong.append(error)
        exchange = getattr(owner, "exchange", None)
        if exchange is not None and exchange.by_kind():
            graph.own[_below(name, "exchange")] = Stateful(exchange.state, exchange.restore)
    leaves, states = dict(sorted(graph.leaves.items())), dict(sorted(graph.states.items()))
    return graph._replace(leaves=leaves, states=states)


def check(name: str, thing: Any) -> None:
    """Raise TypeError if an object is not of a kind that can be saved, or one below it. The message names it."""
    graph = Graph({}, {}, {}, [], [])
    _walk(name, thing, graph, {}, [])
    graph.check()


def _walk(name: str, thing: Any, graph: Graph, met: dict[int, Any], owners: list[tuple[str, HasVariables]]) -> None:
    try:
        _visit(name, thing, graph, met, owners)
    except (TypeError, ValueError) as error:  # goes on: the variables say which ranks are to know of it
        graph.wrong.append(error)


def _visit(name: str, thing: Any, graph: Graph, met: dict[int, Any], owners: list[tuple[str, HasVariables]]) -> None:
    if id(thing) in met:
        return
    if isinstance(thing, Variable) or arrays.can_be_filled(thing):
        _add(graph, met, name, thing)
        return
    met[id(thing)] = thing
    if isinstance(thing, Growing):
        graph.growing.append(thing)
    if isinstance(thing, HasVariables):
        owners.append((name, thing))
        return
    children = _children(thing)
    if children is None:
        _put(graph.states, _below(name, _STATE), _stateful(thing, name))
        return
    for part, child in children:
        _walk(_below(name, _escaped(part)), child, graph, met, owners)


def _below(name: str, part: str) -> str:
    return f"{name}/{part}" if name else part


def _add(graph: Graph, met: dict[int, Any], name: str, leaf: Any) -> None:
    if id(leaf) not in met:
        met[id(leaf)] = leaf
        _put(graph.leaves, name, leaf)


def _put(named: dict[str, Any], name: str, thing: Any) -> None:
    if name in named:
        raise ValueError(f"two objects of a checkpoint have the name {name!r}: give one of them another key")
    named[name] = thing


def _children(thing: Any) -> Iterator[tuple[str, Any]] | None:
    """Return the objects below one, by the part of the name that each has; None if it is not a structure."""
    if isinstance(thing, Node):
        return iter(thing.tracked().items())
    if isinstance(thing, Mapping):
        return ((str(key), each) for key, each in thing.items())
    if isinstance(thing, (list, tuple)):
        return ((str(i), each) for i, each in enumerate(thing))
    return None


def _of_replicas(parts: list[Stateful]) -> Stateful:
    def set_all(states: list[Any]) -> None:
        for part, state in zip(parts, states, strict=True):
            part.set(state)

    return Stateful(lambda: [part.get() for part in parts], set_all, len(parts))


def _stateful(thing: Any, name: str) -> Stateful:
    if isinstance(thing, PerReplica):
        with contextlib.suppress(TypeError):
            return _of_replicas([_stateful(each, name) for each in thing.values])
    bits = getattr(thing, "bit_generator", None)
    if isinstance(bits, np.random.BitGenerator):
        return Stateful(lambda: bits.state, lambda state: setattr(bits, "state", state))
    for get, set_ in _METHODS:
        if callable(getattr(thing, get, None)) and callable(getattr(thing, set_, None)):
            return Stateful(getattr(thing, get), getattr(thing, set_))
    kind = type(thing).__name__
    raise TypeError(
        f"{name}: a checkpoint cannot keep {'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}: give variables, arrays, "
        "optimizers, metrics, distributed datasets, random generators (also a PerReplica of these), lists, dicts and "
        "checkpoints of these, or an object with get_state() and set_state(state)"
    )


def _escaped(part: str) -> str:
    """Return a part of a name in which "/" is not a separator, and "." is not the group itself for HDF5."""
    return part.replace("%", "%25").replace("/", "%2F") if part not in ("", ".", "..") else f"%{part}"


# --- states as bytes -----------------------------------------------------------------


def pack_state(state: Any) -> bytes:
    """Return a state of numbers, texts, arrays and structures of these as JSON. Raise TypeError for anything else."""
    return json.dumps(_as_json(state), default=_array_as_json, separators=(",", ":")).encode()


def _as_json(state: Any) -> Any:
    if isinstance(state, Mapping):
        for key in state:
            if not json_arrays.is_text(key) or key in (f"{_MARK}int", f"{_MARK}text"):
                # JSON would return another key than it was given.
                raise TypeError(f"a key of a state in a checkpoint must be a text, not {key!r}")
        return {key: _as_json(each) for key, each in state.items()} if isinstance(state, dict) else state
    if isinstance(state, (list, tuple)):
        return [*map(_as_json, state)]
    return json_arrays.exact(state, _MOST_BITS, _MARK) if isinstance(state, (int, str)) else state


def unpack_state(text: bytes) -> Any:
    """Return what `pack_state` has made, with lists for tuples, and NumPy's arrays for those of other libraries.

    Raise ValueError if the text is not a state, as in a damaged file.
    """
    try:
        return json.loads(text, object_hook=_of_json)
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _array_as_json(value: Any) -> Any:
    if isinstance(value, (np.integer, np.floating, np.bool_)):
        return value.item()
    if hasattr(value, "__array__") or hasattr(value, "__dlpack__"):
        with contextlib.suppress(TypeError):
            return json_arrays.packed(arrays.to_host(value))
    raise TypeError(f"a state in a checkpoint must be of numbers, texts, arrays, lists and dicts, not {value!r}")


def _of_json(members: dict[str, Any]) -> Any:
    if members.keys() == {"array", "dtype", "shape"}:
        return json_arrays.unpacked(members)
    return json_arrays.restored(members, _MARK)


def as_before(value: Any, like: Any) -> Any:
    """Return an unpacked state with the types of another one: its tuples, and arrays of its libraries."""
    if isinstance(value, np.ndarray):
        return value if like is None or isinstance(like, np.ndarray) else arrays.from_host(value, like)
    if isinstance(value, dict) and isinstance(like, Mapping):
        return {key: as_before(each, like.get(key)) for key, each in value.items()}
    if isinstance(value, list) and isinstance(like, (list, tuple)) and len(value) == len(like):
        parts = [as_before(*each) for each in zip(value, like, strict=True)]
        kind: Any = type(like)
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    return value
