"""The variables that a parameter server keeps, and what other ranks ask of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrat import nest
from mpistrat.messages.bundles import SEVERAL, answer_bundle
from mpistrat.messages.failures import failure_of
from mpistrat.messages.functions import FunctionKeeper
from mpistrat.messages.pickling import Packed, pack, unpack
from mpistrat.messages.post import Letter, Post
from mpistrat.variables.local import LocalVariable
from mpistrat.variables.on_server import ServerVariable

Facts = tuple[tuple[int, ...], np.dtype]


class HeldVariable(LocalVariable):
    """The array of a `ServerVariable`, on its parameter server. Update functions get it."""

    def __reduce__(self) -> Any:
        return self._container().__reduce__()


class VariableStore:
    """The variables of this parameter server.

    It does what one letter asks for before it looks at the next, so a read never sees half of a write.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[ServerVariable, HeldVariable]] = {}
        self._users: dict[int, int] = {}  # number of ranks that have not freed a variable
        self._left: set[int] = set()
        self._functions = FunctionKeeper()
        self._replies: dict[str, Callable[[Letter], Any]] = {
            "create": self._create,
            "meet": self._meet,
            "read": self._array,
            "rows": lambda letter: self._array(letter)[unpack(letter.body)],
            "write": self._write,
            "update": self._update,
        }

    def handle(self, post: Post, letter: Letter, where: str) -> None:
        """Do what a letter asks for, and answer it."""
        if letter.kind == "function":
            self._functions.keep(letter)
        elif letter.kind == "free":
            self._free(letter.head[0])
        elif letter.kind == SEVERAL:
            answer_bundle(post, letter, lambda each: self._outcome(each, where))
        else:
            try:
                post.answer(letter, self._replies[letter.kind](letter))
            except KeyboardInterrupt:
                raise
            except (
                BaseException
            ) as error:  # raised where it was asked for; sys.exit() must not end the server
                post.refuse(letter, error, where)

    def _outcome(self, letter: Letter, where: str) -> Packed:
        """Return the packed answer to one of several requests, or the packed error that it met."""
        try:
            value = self._replies[letter.kind](letter)
            return pack(value, copy=letter.kind == "update")[0]  # a later one may change what it returns
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return pack(failure_of(error, where))[0]

    def _array(self, letter: Letter) -> np.ndarray:
        return self._held[letter.head[1]][1].array

    def leave(self, rank: int) -> None:
        """Note that the program of a rank has ended."""
        self._left.add(rank)

    def _create(self, letter: Letter) -> None:
        _, key, users = letter.head
        variable, value = unpack(letter.body)
        held = HeldVariable.copy_of(variable, np.array(value), weakref.ref(variable), 0)
        self._held[key] = (variable, held)  # type: ignore[assignment]
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
            del self._users[key], self._held[key]

    def _write(self, letter: Letter) -> None:
        _, key, method = letter.head
        held = self._held[key][1]
        if method == "setitem":
            where, value = unpack(letter.body)
            held[where] = value
        else:
            held.write(method, unpack(letter.body))

    def _update(self, letter: Letter) -> Any:
        _, key, digest = letter.head
        variable, held = self._held[key]
        args, kwargs = unpack(letter.body)
        function = self._functions.function(letter.source, digest)
        args, kwargs = nest.map_structure(self._here, (args, kwargs)) if args or kwargs else (args, kwargs)
        extended = variable.distribute_strategy.extended
        return extended.update_non_slot(None, function, (held, *args), kwargs, group=False)[0]

    def _here(self, value: Any) -> Any:
        if not isinstance(value, ServerVariable):
            return value
        if value.key not in self._held:
            raise ValueError(
                f"variable {value.name!r} is on {value.device}, not on the parameter server of the updated variable: "
                "create it in extended.colocate_vars_with(variable)"
            )
        return self._held[value.key][1]
