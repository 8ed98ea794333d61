"""Writes of functions that a parameter server has taken, and applies when the coordinator decides so."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from mpistrat.messages.failures import failure_of
from mpistrat.messages.pickling import EMPTY, Packed, pack, unpack
from mpistrat.messages.post import Letter, Post
from mpistrat.variables.store import VariableStore


class Write(NamedTuple):
    """A write to a variable, as it is sent.

    Attributes
    ----------
    key : int
        The variable.
    method : str or None
        The method of `HeldVariable`; None for a function that updates the variable.
    digest : bytes
        The name of that function.
    value : Packed
        What is written, or the arguments of the function.
    """

    key: int
    method: str | None
    digest: bytes
    value: Packed


def pack_writes(writes: list[Write]) -> Packed:
    """Return writes as one body of a letter, whose arrays are not copied."""
    facts = [(each.key, each.method, each.digest, bytes(each.value.stream)) for each in writes]
    counts = [len(each.value.buffers) for each in writes]
    buffers = tuple(buffer for each in writes for buffer in each.value.buffers)
    return Packed(pickle.dumps((facts, counts), 5), buffers)


def unpack_writes(body: Packed) -> list[Write]:
    """Return the writes of `pack_writes`."""
    facts, counts = pickle.loads(body.stream)
    buffers = iter(body.buffers)
    return [
        Write(key, method, digest, Packed(stream, tuple(next(buffers) for _ in range(count))))
        for (key, method, digest, stream), count in zip(facts, counts, strict=True)
    ]


class PreparedWrites:
    """The writes of functions that have ended on a worker, and of which the coordinator has not decided.

    The worker sends them with the number of the call, and waits for the answer before it tells the coordinator the
    result. So a call that the coordinator has heard of is prepared on all servers. The coordinator then says
    ``commit``, or ``abort`` if the worker was lost first. A number is applied once: it is forgotten with its writes.

    Parameters
    ----------
    store : VariableStore
    """

    def __init__(self, store: VariableStore):
        self._store = store
        self._waiting: dict[int, list[Callable[[], object]]] = {}
        self._aborted: set[int] = set()  # numbers whose writes have not come, of lost workers

    def takes(self, kind: str) -> bool:
        """Return whether a letter of this kind is for `handle`."""
        return kind in ("prepare", "commit", "abort")

    def handle(self, post: Post, letter: Letter, where: str) -> None:
        """Do what a letter asks for, and answer it."""
        if letter.kind == "prepare":
            self._prepare(post, letter, where)
        elif letter.kind == "commit":
            (number,) = letter.head
            with self._store.as_one():
                body = self._apply(number, where)
            post.send(letter.source, "committed", (number,), body)
        elif self._waiting.pop(letter.head[0], None) is None:
            self._aborted.add(letter.head[0])

    def _prepare(self, post: Post, letter: Letter, where: str) -> None:
        _, number = letter.head
        if number in self._aborted:  # the worker was lost, and this arrived late
            self._aborted.discard(number)
            return
        writes = self._waiting[number] = []
        try:
            writes += [self._checked(each, letter.source) for each in unpack_writes(letter.body)]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the function raises it, and the coordinator says abort
            post.refuse(letter, error, where)
        else:
            post.answer(letter, None)

    def _checked(self, write: Write, source: int) -> Callable[[], object]:
        """Return the application of a write. Raise what it would raise, as far as that can be known."""
        value = unpack(write.value)
        if write.method is None:
            return self._store.prepared_update(write.key, self._store.function(source, write.digest), *value)
        self._store.held(write.key).check_write(write.method, value)
        return partial(self._store.write, write.key, write.method, value)

    def _apply(self, number: int, where: str) -> Packed:
        """Apply the writes of a number. Return the first error of an update function, as it is sent."""
        body: Packed = EMPTY
        for write in self._waiting.pop(number):
            try:
                write()
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                body = pack(failure_of(error, where))[0] if body is EMPTY else body
        return body
