"""The objects below a checkpoint: the names and states under which they are saved.

A name is the path to an object, with "/" between its parts: attributes, keys and positions. The names of variables play
no part, so a program that makes its variables in another order finds them again.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from mpistrat.arrays import arrays, json_arrays
from mpistrat.strategy import Variable
from mpistrat.training.checkpoint.format import dtype_of
from mpistrat.values import PerReplica

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
_MOST_BITS = 1 << 12  # of an integer in decimal digits: Python refuses to read more than 4,300 digits
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
    """The variables and states of the objects below a checkpoint, by name, in the order of names.

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
    """Return the variables and states of the objects below ``root``. An object has the first name that it gets."""
    graph = Graph({}, {}, {}, [], [])
    met: dict[int, Any] = {}  # keeps the objects, so that no other gets the identity of one
    owners: list[tuple[str, HasVariables]] = []
    _walk("", root, graph, met, owners)
    # After all others: the slots of an optimizer are named after the variables that they belong to.
    names = {id(leaf): name for name, leaf in graph.leaves.items()}
    for name, owner in owners:
        try:
            variables = owner.named_variables(lambda variable: names.get(id(variable)) or _escaped(variable.name))
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
    except Exception as error:  # kept for `Graph.check`: the variables, which come later, say which ranks must raise
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
    if callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None)):
        state = StateDict(thing)
        for path, array in state.arrays().items():
            _add(graph, met, _below(name, path), array)
        _put(graph.states, _below(name, _STATE), Stateful(state.get, state.set))
        graph.growing.append(state)
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
    """Return the children of a structure with their keys, or None for another object."""
    if isinstance(thing, Node):
        return iter(thing.tracked().items())
    if isinstance(thing, Mapping):
        return ((str(key), value) for key, value in thing.items())
    if isinstance(thing, (list, tuple)):
        return ((str(i), value) for i, value in enumerate(thing))
    return None


def _of_replicas(parts: list[Stateful]) -> Stateful:
    def set_all(states: list[Any]) -> None:
        for part, state in zip(parts, states, strict=True):
            part.set(state)

    return Stateful(lambda: [part.get() for part in parts], set_all, len(parts))


def _stateful(thing: Any, name: str) -> Stateful:
    if isinstance(thing, PerReplica):
        # If the components have no state, the error below names the PerReplica.
        with contextlib.suppress(TypeError):
            return _of_replicas([_stateful(value, name) for value in thing.values])
    # A NumPy Generator keeps its state in its bit generator.
    bits = getattr(thing, "bit_generator", None)
    if isinstance(bits, np.random.BitGenerator):
        return Stateful(lambda: bits.state, lambda state: setattr(bits, "state", state))
    for get, set_ in _METHODS:
        if callable(getattr(thing, get, None)) and callable(getattr(thing, set_, None)):
            return Stateful(getattr(thing, get), getattr(thing, set_))
    kind = type(thing).__name__
    raise TypeError(
        f"{name}: a checkpoint cannot keep {'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}: give variables, arrays, "
        "optimizers, metrics, distributed datasets, random generators (also a PerReplica of these), modules and "
        "optimizers of torch, lists, dicts and checkpoints of these, or an object with get_state() and set_state(state)"
    )


def _escaped(part: str) -> str:
    """Return a part of a name in which "/" is not a separator, and "." is not the group itself for HDF5."""
    return part.replace("%", "%25").replace("/", "%2F") if part not in ("", ".", "..") else f"%{part}"


def pack_state(state: Any) -> bytes:
    """Return a state of numbers, texts, arrays and structures of these as JSON. Raise TypeError for anything else."""
    return json.dumps(_as_json(state), default=_array_as_json, separators=(",", ":")).encode()


def _as_json(state: Any) -> Any:
    if isinstance(state, Mapping):
        for key in state:
            if not json_arrays.is_text(key) or key in (f"{_MARK}int", f"{_MARK}text"):
                # JSON would return another key than it was given.
                raise TypeError(f"a key of a state in a checkpoint must be a text, not {key!r}")
        return {key: _as_json(value) for key, value in state.items()} if isinstance(state, dict) else state
    if isinstance(state, (list, tuple)):
        return [*map(_as_json, state)]
    return json_arrays.exact(state, _MOST_BITS, _MARK) if isinstance(state, (int, str)) else state


def unpack_state(text: bytes) -> Any:
    """Return the state in a text of `pack_state`, with lists for tuples, and NumPy arrays for other arrays.

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
    is_array = members.keys() == {"array", "dtype", "shape"}
    return json_arrays.unpacked(members) if is_array else json_arrays.restored(members, _MARK)


def with_types_of(value: Any, like: Any) -> Any:
    """Return an unpacked state with the types of another one: its tuples, and arrays of its libraries."""
    if isinstance(value, np.ndarray):
        return value if like is None or isinstance(like, np.ndarray) else arrays.from_host(value, like)
    if isinstance(value, dict) and isinstance(like, Mapping):
        return {key: with_types_of(item, like.get(key)) for key, item in value.items()}
    if isinstance(value, list) and isinstance(like, (list, tuple)) and len(value) == len(like):
        parts = [with_types_of(*pair) for pair in zip(value, like, strict=True)]
        kind: Any = type(like)
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    return value


# --- objects with state_dict() and load_state_dict(state), as of PyTorch ----------------------------------

_ARRAY, _ITEMS = ("\0array at", "\0items")  # keys: of an array, and of a dict whose keys are not texts


class StateDict:
    """The state of such an object, as arrays beside a structure that JSON keeps.

    The arrays of the object itself are read and filled in place. Buffers of a module, such as statistics of batches,
    stay in the structure, since they may differ between ranks.
    """

    def __init__(self, thing: Any):
        self._thing = thing
        self._grown = False

    def arrays(self) -> dict[str, Any]:
        """Return the arrays of the object, by their paths."""
        return self._described()[1]

    def get(self) -> Any:
        """Return the structure."""
        return self._described()[0]

    def set(self, structure: Any) -> None:
        """Load a structure into the object, with its own arrays. Arrays that it lacks are created as zeros."""
        before = self.arrays()
        self._thing.load_state_dict(_taken(structure, before, self._thing.state_dict()))
        self._grown = not before.keys() >= self.arrays().keys()

    def when_grown(self, function: Callable[[], object]) -> None:
        """Call a function if the last structure has made new arrays."""
        if self._grown:
            self._grown = False
            function()

    def _described(self) -> tuple[Any, dict[str, Any]]:
        """Return the structure, and the arrays by their paths."""
        states: dict[str, Any] = {}
        named_buffers = getattr(self._thing, "named_buffers", None)
        buffers = {name for name, _ in named_buffers()} if named_buffers is not None else set()

        def described(state: Any, path: str) -> Any:
            if path not in buffers and arrays.can_be_filled(state):
                # A DTensor, of which this rank has only a part.
                if hasattr(state, "to_local"):
                    raise TypeError(f"{path} is cut over ranks, as by fully_shard: use torch.distributed.checkpoint")
                states[path] = state
                dtype, shape = arrays.dtype_and_shape(state)
                return {_ARRAY: path, "dtype": dtype.name, "shape": [*shape], "torch": type(state) is not np.ndarray}
            if isinstance(state, Mapping):
                below = {key: described(value, f"{path}/{key}" if path else str(key)) for key, value in state.items()}
                # JSON has texts as keys alone. A PyTorch optimizer numbers its parameters.
                return below if all(isinstance(key, str) for key in below) else {_ITEMS: [*map(list, below.items())]}
            if isinstance(state, (list, tuple)):
                parts = [described(value, f"{path}/{number}") for number, value in enumerate(state)]
                return tuple(parts) if isinstance(state, tuple) else parts
            return state

        return described(self._thing.state_dict(), ""), states


def _taken(structure: Any, known: Mapping[str, Any], like: Any) -> Any:
    """Return a state of a structure, with ``known`` arrays by path, or zeros, and dicts of the kinds of ``like``."""
    if isinstance(structure, (list, tuple)):
        likes = like if isinstance(like, (list, tuple)) and len(like) == len(structure) else (None,) * len(structure)
        parts = [_taken(value, known, like_value) for value, like_value in zip(structure, likes, strict=True)]
        return tuple(parts) if isinstance(structure, tuple) else parts
    if not isinstance(structure, dict):
        return structure
    if _ARRAY in structure:
        if structure[_ARRAY] in known:
            return known[structure[_ARRAY]]
        zeros = np.zeros(structure["shape"], dtype_of(structure["dtype"]))
        # An object that takes tensors has imported torch.
        return arrays.from_host(zeros, sys.modules["torch"].empty(0)) if structure["torch"] else zeros
    result = copy.copy(like) if isinstance(like, dict) else {}  # a Counter or an OrderedDict, with its attributes
    items = {key: _taken(value, known, result.get(key)) for key, value in structure.get(_ITEMS, structure.items())}
    result.clear()
    result.update(items)
    return result
