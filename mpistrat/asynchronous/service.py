"""What workers and parameter servers do for the coordinator, until it says goodbye."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mpistrat import context, nest
from mpistrat.asynchronous import on_worker
from mpistrat.messages.backoff import Backoff
from mpistrat.messages.contact import Contact
from mpistrat.messages.failures import failure_of
from mpistrat.messages.functions import FunctionKeeper
from mpistrat.messages.pickling import is_plain, pack, unpack
from mpistrat.messages.post import Letter
from mpistrat.runtime.topology import alone
from mpistrat.strategies.parameter_server import strategy_of
from mpistrat.variables.on_server import ServerVariable
from mpistrat.variables.store import VariableStore


def serve(contact: Contact) -> None:
    """Serve the coordinator until its program ends."""
    job, number = contact.roles.task_of(contact.post.rank)
    with alone(f"{contact.role} runs a function alone"):
        if job == "ps":
            _serve_variables(contact)
            return
        try:
            _Worker(contact, number).serve()
        finally:
            on_worker.end()


def _serve_variables(contact: Contact) -> None:
    post, store, backoff = contact.post, VariableStore(), Backoff()
    while True:
        letter = post.receive()
        if letter is None:
            backoff.pause()
            continue
        backoff.reset()
        if letter.kind == "goodbye":
            _say_goodbye(contact, letter)
            return
        store.handle(post, letter, contact.role)


def _say_goodbye(contact: Contact, letter: Letter) -> None:
    contact.post.send(letter.source, "goodbye")
    contact.post.flush()


class _Worker:
    """A worker: runs one task at a time, in the order in which they arrive."""

    def __init__(self, contact: Contact, number: int):
        self._contact, self._post = contact, contact.post
        self._functions = FunctionKeeper()
        self._tasks: deque[Letter] = deque()
        self._parts = on_worker.begin(number)

    def serve(self) -> None:
        backoff = Backoff()
        while True:
            letter = self._post.receive()
            if letter is not None:
                backoff.reset()
                if letter.kind == "goodbye":
                    _say_goodbye(self._contact, letter)
                    return
                self._handle(letter)
            elif self._tasks:  # after all letters: one of them may take a task back
                self._run(self._tasks.popleft())
                backoff.reset()
            else:
                backoff.pause()

    def _handle(self, letter: Letter) -> None:
        if letter.kind == "task":
            self._tasks.append(letter)
        elif letter.kind == "function":
            self._functions.keep(letter)
        elif letter.kind == "drop":
            self._post.send(letter.source, "dropped", tuple(task.head[0] for task in self._tasks))
            self._tasks.clear()
        elif letter.kind == "part":
            key, digest, strategy = letter.head
            with _in_scope(strategy):
                self._parts.make(
                    key, lambda: self._functions.function(letter.source, digest)(*unpack(letter.body))
                )
        elif letter.kind == "free":
            self._parts.free(letter.head[0])

    def _run(self, letter: Letter) -> None:
        number, digest, strategy = letter.head
        start = time.perf_counter()
        try:
            function = self._functions.function(letter.source, digest)
            args, kwargs = unpack(letter.body)
            with _in_scope(strategy):
                result = function(*args, **kwargs)
            body, kind = pack(_without_variables(result))[0], "result"
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit() in a task must not end the worker
            body, kind = pack(failure_of(error, self._contact.role))[0], "failed"
        self._post.send(letter.source, kind, (number, time.perf_counter() - start), body)
        if body.buffers:
            self._post.flush()  # the next task may change the arrays


@contextmanager
def _in_scope(strategy: int | None) -> Iterator[None]:
    stack = context.stack()
    depth = len(stack)
    if strategy is not None:
        stack.append(strategy_of(strategy).extended.cross_replica_mode)
    try:
        yield
    finally:
        del stack[depth:]


def _without_variables(result: Any) -> Any:
    """Return a result with the values of variables in their place."""
    if is_plain(result):
        return result
    return nest.map_structure(
        lambda leaf: leaf.read_value() if isinstance(leaf, ServerVariable) else leaf, result
    )
