"""The variables that a parameter server keeps, and what other ranks ask of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpistrat import nest
from mpistrat.memory.published import Memory, Place
from mpistrat.messages.functions import FunctionKeeper
from mpistrat.messages.pickling import Packed, failure_of, pack, unpack
from mpistrat.messages.post import SEVERAL, Letter, Post, outcomes_of
from mpistrat.values import IndexedSlices
from mpistrat.variables.local import LocalVariable
from mpistrat.variables.on_server import ServerVariable

Facts = tuple[tuple[int, ...], np.dtype]


class HeldVariable(LocalVariable):
    """The array of a `ServerVariable`, on its parameter server. Update functions get it."""

    def __reduce__(self) -> Any:
        return self._container().__reduce__()

    def check_write(self, method: str, value: Any) -> None:
        """Raise the error of a write that does not fit, and write nothing."""
        if method == "setitem":
            where, rows = value
            np.empty_like(self.array)[where] = rows
        elif isinstance(value, IndexedSlices):
            self.check_rows(value)
        else:
            self.fitting(value)


class VariableStore:
    """The variables of this parameter server, in ``memory``. It does what one letter asks for before the next."""

    def __init__(self, memory: Memory | None = None) -> None:
        self._memory = memory or Memory()
        self._places: dict[int, Place | None] = {}
        self._held: dict[int, tuple[ServerVariable, HeldVariable]] = {}
        self._users: dict[int, int] = {}  # number of ranks that have not freed a variable
        self._left: set[int] = set()
        self._functions = FunctionKeeper()
        self._replies: dict[str, Callable[[Letter], Any]] = {
            "create": self._create,
            "meet": self._meet,
            "where": lambda letter: self._places.get(letter.head[1]),
            "read": lambda letter: self.array(letter.head[1]),
            "rows": lambda letter: self.array(letter.head[1])[unpack(letter.body)],
            "write": lambda letter: self.write(letter.head[1], letter.head[2], unpack(letter.body)),
            "update": self._update,
        }

    def handle(self, post: Post, letter: Letter, where: str) -> None:
        """Do what a letter asks for, and answer it."""
        if letter.kind == "function":
            self._functions.keep(letter)
        elif letter.kind == "free":
            self._free(letter.head[0])
        elif letter.kind == SEVERAL:
            with self.as_one():
                body = outcomes_of(letter, lambda each: self._outcome(each, where))
            post.reply(letter, body)
        else:
            try:
                with self.as_one():
                    value = self._replies[letter.kind](letter)
                post.answer(letter, value)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # raised where it was asked for; sys.exit() must not end the server
                post.refuse(letter, error, where)

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """Let other ranks see all writes of the block at once."""
        try:
            yield
        finally:
            self._memory.end()  # the first write has begun it

    def _outcome(self, letter: Letter, where: str) -> Packed:
        """Return the packed answer to one of several requests, or the packed error that it met."""
        try:
            value = self._replies[letter.kind](letter)
            return pack(value, copy=letter.kind == "update")[0]  # a later one may change what it returns
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
        """Keep a copy of a value as that of a variable."""
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
            where, rows = value
            held[where] = rows
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

    def _create(self, letter: Letter) -> None:
        _, key, users = letter.head
        self.hold(*unpack(letter.body))
        self._users[key] = users

    def _meet(self, letter: Letter) -> tuple[str, Facts] | None:
        """Return the name, shape and dtype of a variable that another rank creates; None if it has not yet."""
        _, key, creator = letter.head
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
        if not self._users[key]:
            del self._users[key], self._held[key], self._places[key]

    def _update(self, letter: Letter) -> Any:
        _, key, digest = letter.head
        args, kwargs = unpack(letter.body)
        return self.prepared_update(key, self.function(letter.source, digest), args, kwargs)()

    def _here(self, value: Any) -> Any:
        if not isinstance(value, ServerVariable):
            return value
        if value.key not in self._held:
            raise ValueError(
                f"variable {value.name!r} is on {value.device}, not on the parameter server of the updated variable: "
                "create it in extended.colocate_vars_with(variable)"
            )
        return self._held[value.key][1]
