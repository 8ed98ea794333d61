"""Variables on parameter servers: their reads and writes by other ranks, and the arrays on a server."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpistrat import nest
from mpistrat.arrays import arrays
from mpistrat.memory.published import Location, Memory
from mpistrat.messages.mailbox import SEVERAL, FunctionKeeper, Mailbox, ReceivedMessage, outcomes_of
from mpistrat.messages.pickling import Packed, failure_of, pack, refer, unpack
from mpistrat.messages.servers import Update
from mpistrat.values import ArrayLike, IndexedSlices, component
from mpistrat.variables.local import LocalVariable
from mpistrat.variables.partitioners import Sharding
from mpistrat.variables.variable import Variable

_numbers = itertools.count()  # equal on all ranks that create variables: these create the same ones
_known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class ServerVariable(Variable):
    """A variable whose array is on a parameter server, or whose rows are divided between several.

    `mpistrat.ParameterServerStrategy` makes it. Each assignment is applied as a whole: no update is lost, and a read
    never sees half of one.

    The parts of a divided variable are its *shards*, which are variables themselves. It reads as one array. A write is
    cut, and each shard applies its part as a whole: a read may see one shard's new and another's old value.

    ``key`` is its number among the variables of the program, and ``server`` the number of the parameter server that
    holds it, or its first shard.
    """

    each_replica_writes = False
    key: int
    server: int
    _shards: tuple[ServerVariable, ...] = ()

    def _initialize(self, value: np.ndarray) -> None:
        self._place(value, self._strategy.extended.placement(value.shape, value.dtype))

    def _place(self, value: np.ndarray, servers: list[int]) -> None:
        self.key, self.server = next(_numbers), servers[0]
        self._facts = value.shape, value.dtype
        _known[self.key] = self
        if len(servers) == 1:
            self._strategy.extended.create(self, value)
            end = weakref.finalize(self, self._strategy.extended.servers.free, self.server, self.key)
            end.atexit = False  # the servers end with the program, and free all
            return
        parts = Sharding(len(value), len(servers)).cut(value)
        self._shards = tuple(
            self._shard(f"{self._name}/part_{i}", *own) for i, own in enumerate(zip(parts, servers, strict=True))
        )

    def _shard(self, name: str, rows: np.ndarray, server: int) -> ServerVariable:
        shard: ServerVariable = object.__new__(type(self))
        shard.__dict__.update(self.__dict__)
        shard._name = name
        shard._place(np.ascontiguousarray(rows), [server])
        return shard

    def _hold_copy_of(self, variable: Any) -> None:
        self._shards = ()
        self._place(variable.read_value(), [shard.server for shard in variable.shards])

    # --- what it is ------------------------------------------------------------------

    @property
    def shards(self) -> tuple[ServerVariable, ...]:
        """The shards in the order of rows; the variable itself if it is not divided."""
        return self._shards or (self,)

    @property
    def variables(self) -> list[ServerVariable]:
        """The shards in the order of rows. A variable that is not divided does not have the attribute."""
        if not self._shards:
            raise AttributeError(f"variable {self.name!r} is not divided into shards")
        return list(self._shards)

    @property
    def _sharding(self) -> Sharding:
        return Sharding(self.shape[0], len(self.shards))

    @property
    def device(self) -> Any:
        """The parameter server that holds the variable; a tuple of one for each shard if it is divided."""
        devices = tuple(f"/job:ps/task:{shard.server}" for shard in self.shards)
        return devices if self._shards else devices[0]

    def _shape_and_dtype(self) -> tuple[tuple[int, ...], np.dtype]:
        return self._facts

    def __repr__(self) -> str:
        kind = f"{type(self).__name__} {self.name!r}"
        return f"<{kind} shape={self.shape} dtype={self.dtype}, on {self.device}>"

    # --- references ------------------------------------------------------------------

    def __reduce__(self) -> Any:
        # In a message it is a reference, without the value. Elsewhere, as in a file, it cannot be pickled.
        if not refer(self):
            return super().__reduce__()
        names = ("_strategy", "_synchronization", "_aggregation", "_trainable", "_name", "_facts", "_shards")
        facts = {name: getattr(self, name) for name in names}
        return _referred, (type(self), self.key, self.server, facts)

    # --- reading ---------------------------------------------------------------------

    def _ask_shards(self, kind: str, values: list[tuple[int, Any]], *head: Any) -> list[Any]:
        """Send each of some shards its own value, and return their replies."""
        shards = self.shards
        requests = [(shards[i].server, kind, (shards[i].key, *head), value) for i, value in values]
        return self._strategy.extended.servers.ask_all(requests)

    def _read(self) -> np.ndarray:
        return read_all([self])[0]

    def own_copy(self) -> np.ndarray:
        """Return a copy of the value, which the parameter server sends."""
        return self._read()

    def read_value(self) -> np.ndarray:
        return self._read()

    def sparse_read(self, indices: Any, name: str | None = None) -> np.ndarray:
        checked = self._checked_indices(indices, 1)
        shape, dtype = self._facts
        rows = np.empty((checked.size, *shape[1:]), dtype)
        chosen = self._sharding.by_shard(checked.reshape(-1))
        replies = self._ask_shards("rows", [(part.shard, part.rows) for part in chosen])
        for part, reply in zip(chosen, replies, strict=True):
            rows[part.positions] = reply
        return rows.reshape(*checked.shape, *shape[1:])

    def _item(self, key: Any) -> Any:
        if not self.shape:
            return self._read()[key]
        selection = self._sharding.select(key)
        return _joined(self._ask_shards("rows", list(selection.parts)))[selection.rest]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._shards or self._read())

    # --- writing ---------------------------------------------------------------------

    def write(self, method: str, value: Any) -> None:
        self._require_own_strategy("write")
        value = _plain(value)
        if isinstance(value, IndexedSlices):
            self.check_rows(value)
        elif self._shards:
            value = arrays.as_numpy(value)
            self._check_value(value)  # before a shard is written
        parts = enumerate(self._cut(value))
        # A shard without rows gets no message.
        touched = [(i, part) for i, part in parts if not isinstance(part, IndexedSlices) or part.indices.size]
        self._ask_shards("write", touched, method)

    def _cut(self, value: Any) -> list[Any]:
        """Return the part of a value for each shard, or the value itself for all."""
        number = len(self.shards)
        if number == 1:
            return [value]
        if isinstance(value, ServerVariable) and len(value.shards) == number:
            return list(value.shards)
        if isinstance(value, IndexedSlices):
            parts = [IndexedSlices(value.values[:0], value.indices[:0])] * number
            for part in self._sharding.by_shard(value.indices):
                parts[part.shard] = IndexedSlices(value.values[part.positions], part.rows)
            return parts
        if isinstance(value, np.ndarray) and value.shape == self.shape:
            return self._sharding.cut(value)
        return [value] * number

    def __setitem__(self, key: Any, value: Any) -> None:
        if self._shards:
            raise TypeError(f"variable {self.name!r} has shards: use assign, scatter_update, or assign to a shard")
        arrays.refuse_masked(key)
        self._require_own_strategy("write")
        request = self.server, "write", (self.key, "setitem"), (key, _plain(value))
        self._strategy.extended.servers.ask_all([request])

    def update(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of ``function(variable, *args, **kwargs)``, which runs on the parameter server.

        Of a divided variable it is a tuple: it runs for each shard, with its part of arguments of the variable's shape,
        and of rows.
        """
        return self.result_of_update(iter(self._strategy.extended.servers.update(self.updates(function, args, kwargs))))

    def updates(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Update]:
        """Return the calls of an `update`: one for each shard."""
        cut = [self._cut(value) for value in (*args, *kwargs.values())]
        calls: list[Update] = []
        for i, shard in enumerate(self.shards):
            parts = [values[i] for values in cut]
            named = dict(zip(kwargs, parts[len(args) :], strict=True))
            calls.append((shard, function, tuple(parts[: len(args)]), named))
        return calls

    def result_of_update(self, results: Iterator[Any]) -> Any:
        """Return the result of an `update` from the next results of its calls."""
        results_of_shards = tuple(itertools.islice(results, len(self.shards)))
        return results_of_shards if self._shards else results_of_shards[0]


def read_all(variables: Sequence[Any]) -> list[np.ndarray]:
    """Return the values of variables of one strategy, with one message to each parameter server."""
    shards = [shard for variable in variables for shard in variable.shards]
    servers = variables[0].distribute_strategy.extended.servers
    values = iter(servers.ask_all([(shard.server, "read", (shard.key,), None) for shard in shards]))
    return [_joined([*itertools.islice(values, len(variable.shards))]) for variable in variables]


def update_all(calls: Sequence[tuple[Any, Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """Do `ServerVariable.update` for variables of one strategy, with one message to each parameter server."""
    updates = [update for variable, function, args in calls for update in variable.updates(function, args, {})]
    results = iter(calls[0][0].distribute_strategy.extended.servers.update(updates))
    return [variable.result_of_update(results) for variable, _, _ in calls]


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _plain(value: Any) -> Any:
    """Return a value that is to be written, as it is sent: arrays in place of variables and distributed values."""
    value = component(value)
    if isinstance(value, ArrayLike):
        return np.asarray(value)
    if isinstance(value, IndexedSlices):
        return IndexedSlices(arrays.to_host(value.values), arrays.to_host(value.indices), value.dense_shape)
    return value if isinstance(value, (int, float, complex, list, tuple)) else arrays.as_numpy(value)


def known(key: int) -> ServerVariable:
    """Return the variable of a number that this rank refers to."""
    variable: ServerVariable = _known[key]
    return variable


def _referred(kind: type[ServerVariable], key: int, server: int, facts: dict[str, Any]) -> ServerVariable:
    """Return the variable that a message refers to: one object for each variable and rank."""
    variable = _known.get(key)
    if variable is None:
        variable = object.__new__(kind)
        engine = facts["_strategy"].extended.engine
        variable.__dict__.update(facts, key=key, server=server, _engine=engine)
        _known[key] = variable
    return variable


# --- on a parameter server ------------------------------------------------------


Facts = tuple[tuple[int, ...], np.dtype]


class HeldVariable(LocalVariable):
    """The array of a `ServerVariable`, on its parameter server. Update functions get it."""

    def __reduce__(self) -> Any:
        return self._container().__reduce__()

    def check_write(self, method: str, value: Any) -> None:
        """Raise the error of a write that does not fit, and write nothing."""
        if method == "setitem":
            index, rows = value
            # To memory that is thrown away: NumPy raises what the write would raise.
            np.empty_like(self.array)[index] = rows
        elif isinstance(value, IndexedSlices):
            self.check_rows(value)
        else:
            self.fitting(value)


class VariableStore:
    """The variables of this parameter server, in ``memory``. It handles one message after another."""

    def __init__(self, memory: Memory | None = None) -> None:
        self._memory = memory or Memory()
        self._places: dict[int, Location | None] = {}
        self._held: dict[int, tuple[ServerVariable, HeldVariable]] = {}
        self._users: dict[int, int] = {}  # number of ranks that have not freed a variable
        self._left: set[int] = set()
        self._functions = FunctionKeeper()
        self._replies: dict[str, Callable[[ReceivedMessage], Any]] = {
            "create": self._create,
            "meet": self._meet,
            "where": lambda message: self._places.get(message.head[1]),
            "read": lambda message: self.array(message.head[1]),
            "rows": lambda message: self.array(message.head[1])[unpack(message.body)],
            "write": lambda message: self.write(message.head[1], message.head[2], unpack(message.body)),
            "update": self._update,
        }

    def handle(self, mailbox: Mailbox, message: ReceivedMessage, where: str) -> None:
        """Handle a message, and answer it."""
        if message.kind == "function":
            self._functions.keep(message)
        elif message.kind == "free":
            self._free(message.head[0])
        elif message.kind == SEVERAL:
            with self.as_one():
                body = outcomes_of(message, lambda call: self._outcome(call, where))
            mailbox.reply(message, body)
        else:
            try:
                with self.as_one():
                    value = self._replies[message.kind](message)
                mailbox.answer(message, value)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # raised by the rank that asked; sys.exit() must not end the server
                mailbox.refuse(message, error, where)

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """Let other ranks see all writes of the block at once."""
        try:
            yield
        finally:
            self._memory.end()  # the first write has begun it

    def _outcome(self, message: ReceivedMessage, where: str) -> Packed:
        """Return the packed answer to one of several requests, or the packed error that it met."""
        try:
            # A later request may change what an update returns.
            return pack(self._replies[message.kind](message), copy=message.kind == "update")[0]
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return pack(failure_of(error, where))[0]

    def holds(self, key: int) -> bool:
        return key in self._held

    def leave(self, rank: int) -> None:
        self._left.add(rank)

    def held(self, key: int) -> HeldVariable:
        return self._held[key][1]

    def array(self, key: int) -> np.ndarray:
        """Return the array of a variable, not a copy."""
        return self._held[key][1].array

    def hold(self, variable: ServerVariable, value: np.ndarray) -> None:
        """Keep a copy of a value as the array of a variable."""
        array, self._places[variable.key] = self._memory.copy(value)
        held = HeldVariable.copy_of(variable, array, weakref.ref(variable), 0)
        self._held[variable.key] = (variable, held)  # type: ignore[assignment]

    def function(self, source: int, digest: bytes) -> Any:
        """Return a function that another rank has sent."""
        return self._functions.function(source, digest)

    def write(self, key: int, method: str, value: Any) -> None:
        """Write to a variable."""
        self._memory.begin()
        held = self._held[key][1]
        if method == "setitem":
            index, rows = value
            held[index] = rows
        else:
            held.write(method, value)

    def prepared_update(
        self, key: int, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any]:
        """Return a call of a function that updates a variable. Raise ValueError if an argument is on another server."""
        variable, held = self._held[key]
        args, kwargs = nest.map_structure(self._here, (args, kwargs)) if args or kwargs else (args, kwargs)
        extended = variable.distribute_strategy.extended

        def update() -> Any:
            self._memory.begin()
            return extended.update_non_slot(None, function, (held, *args), kwargs, group=False)[0]

        return update

    def _create(self, message: ReceivedMessage) -> None:
        _, key, users = message.head
        self.hold(*unpack(message.body))
        self._users[key] = users

    def _meet(self, message: ReceivedMessage) -> tuple[str, Facts] | None:
        """Return the name, shape and dtype of a variable that another rank creates; None if it has not yet."""
        _, key, creator = message.head
        if key in self._held:
            variable, held = self._held[key]
            return variable.name, (held.array.shape, held.array.dtype)
        if creator in self._left:
            raise RuntimeError(
                f"rank {creator}, the chief, has ended and has not created this variable: create the same variables "
                "on all ranks, in the same order"
            )
        return None

    def _free(self, key: int) -> None:
        self._users[key] -= 1
        # Each rank that refers to it frees it once.
        if not self._users[key]:
            del self._users[key], self._held[key], self._places[key]

    def _update(self, message: ReceivedMessage) -> Any:
        _, key, digest = message.head
        args, kwargs = unpack(message.body)
        return self.prepared_update(key, self.function(message.source, digest), args, kwargs)()

    def _here(self, value: Any) -> Any:
        if not isinstance(value, ServerVariable):
            return value
        if value.key not in self._held:
            raise ValueError(
                f"variable {value.name!r} is on {value.device}, not on the parameter server of the updated variable: "
                "create it in extended.colocate_vars_with(variable)"
            )
        return self._held[value.key][1]
