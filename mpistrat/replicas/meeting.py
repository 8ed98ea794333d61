"""Several replicas in one rank: their function runs for one after another, and they meet at cross-replica calls.

The first replica runs on the caller's own thread. Without a cross-replica call, so do the others: a plain loop. At the
first such call of the first replica, the others start, each in a thread that is kept for later. Exactly one of all
these threads runs at a time. A replica that comes to the call waits there, and the caller's thread makes the call when
the last one has come. Threads rather than greenlets: a greenlet would hand thread-local state, such as
``torch.no_grad``, to the next replica.
"""

from __future__ import annotations

import contextvars
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any, NoReturn, Protocol

import numpy as np

from mpistrat.collectives import structures
from mpistrat.replicas.group import ReplicaGroup
from mpistrat.runtime.agreement.collective_lock import forbidden_threads
from mpistrat.runtime.agreement.operation import MismatchError, call_site
from mpistrat.runtime.topology import Topology

# NumPy 2 keeps its treatment of floating point errors in a context variable, which a thread gets with the context.
_ERRSTATE_OF_THREAD = int(np.__version__.split(".")[0]) < 2
_SIGNAL_SECONDS = 0.5  # a signal that comes just before a wait does not end it: look for one from time to time
_REFUSED = (
    "was called in a function that strategy.run runs, and this rank plays several replicas: call it outside of run, or "
    "in merge_call"
)


def settings_of_thread() -> tuple[Any, ...] | None:
    """Return settings of this thread that its context variables do not have; None without any."""
    torch: Any = sys.modules.get("torch")
    jax: Any = sys.modules.get("jax")
    if torch is None and jax is None and not _ERRSTATE_OF_THREAD:
        return None
    errors: Any = np.geterr() if _ERRSTATE_OF_THREAD else {}
    of_torch = None
    if hasattr(torch, "is_grad_enabled"):  # there, and wholly imported
        autocast = (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        )
        of_torch = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast
    of_jax = {name: getattr(jax.config, name) for name in _managers()} if hasattr(jax, "config") else {}
    return errors, of_torch, of_jax


@lru_cache(maxsize=1)
def _managers() -> dict[str, Any]:
    """Return the public context managers of JAX that set a value of its configuration in a thread, by its name."""
    jax: Any = sys.modules["jax"]
    members = vars(jax)
    return {name: members[name[4:]] for name in jax.config.values if callable(members.get(name[4:]))}


@contextmanager
def holding_settings(settings: tuple[Any, ...]) -> Iterator[None]:
    """Context in which the settings of another thread hold in this one."""
    errors, of_torch, of_jax = settings
    with ExitStack() as stack:
        stack.enter_context(np.errstate(**errors))
        if of_torch is not None:
            torch: Any = sys.modules["torch"]
            grad, inference, (enabled, dtype, caches) = of_torch
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(torch.autocast("cpu", dtype, enabled, caches))
        for name, value in of_jax.items():
            if getattr(sys.modules["jax"].config, name) != value:
                stack.enter_context(_managers()[name](value))
        yield


class ReplicaEnded(BaseException):
    """Raised in a replica that waits at a call, when another replica of its rank has failed."""


class JointCall(Protocol):
    """A cross-replica call of all replicas of a rank."""

    def give(self, value: Any) -> None:
        """Copy or add the value of the next replica. Does not communicate."""

    def make(self) -> Sequence[Any]:
        """Make the call, and return a result for each replica of the rank."""


class _Gate:
    """A lock that one thread waits at and another opens. It may be open for no reason, so wait in a loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.wait = self._lock.acquire
        self.wait()

    def open(self) -> None:
        if self._lock.locked():  # one thread runs at a time, so that no other opens it meanwhile
            self._lock.release()


class _Worker(threading.Thread):
    """A thread that is kept: it runs one task after another."""

    def __init__(self) -> None:
        super().__init__(name="mpistrat replica", daemon=True)
        self.gate = _Gate()
        self.task: Callable[[], None] | None = None  # to be run, when the gate opens; it must not raise
        self.is_interrupted = False  # it may still meet the exception, so that it is not kept
        self.start()

    def interrupt(self, kind: type[BaseException]) -> None:
        self.is_interrupted = True
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident or 0), ctypes.py_object(kind))

    def run(self) -> None:
        while not self.is_interrupted:
            while self.task is None:
                self.gate.wait()
            task, self.task = self.task, None
            task()
            del task  # which holds a strategy


_idle: list[_Worker] = []  # kept for the next run of any strategy
os.register_at_fork(after_in_child=_idle.clear)


class _Player:
    """A replica of this rank other than the first, from the first call on."""

    def __init__(self, worker: _Worker):
        self.worker, self.gate = worker, _Gate()
        self.may_run = self.has_begun = self.has_ended = False
        self.result: Any = None  # of the call that it waits at
        self.error: BaseException | None = None  # of that call


class ReplicaMeeting:
    """The replicas of this rank, which run one function and meet at cross-replica calls."""

    def __init__(self, topology: Topology, replicas: ReplicaGroup):
        self._topology, self._replicas = topology, replicas
        self._gate = _Gate()  # of the caller's thread
        self._players: list[_Player] = []
        self._names: list[str] = []  # the call that each replica waits at, empty if it has ended
        self._has_met = self._is_running = False
        self._running = 0  # the replica that runs; 0 for the first one, and while a call is made

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicaMeeting:
        return ReplicaMeeting(self._topology, self._replicas)

    def run(self, play: Callable[[int], Any]) -> list[Any]:
        """Return ``play(i)`` for each replica of this rank, ``i`` from 0 on.

        An exception gets a note with the replica's number, ends the replicas that wait, and is raised. Raise
        RuntimeError on every rank if replicas make different calls, and if another thread runs one.
        """
        if self._is_running:
            raise RuntimeError("another thread is in strategy.run: a rank of many replicas runs one function at a time")
        count, caller = self._replicas.count, threading.get_ident()
        results: list[Any] = [None] * count
        self._play, self._results, self._caller = play, results, caller
        self._context, self._settings = contextvars.copy_context(), settings_of_thread()
        self._names = [""] * count
        self._is_running = True
        self._broken: BaseException | None = None  # ends the replicas that wait
        self._of_call: BaseException | None = None  # raised by a call, in each replica
        self._has_met, replica, outermost = False, 0, caller not in forbidden_threads
        if outermost:
            forbidden_threads[caller] = _REFUSED
        try:
            results[0] = play(0)
            if self._broken is not None:  # its error did not leave the first replica
                raise self._broken
            if self._has_met:
                self._let_all_run()
                for i, name in enumerate(self._names):
                    if name:
                        self._refuse(0, i)
            else:
                for replica in range(1, count):
                    results[replica] = play(replica)
        except BaseException as error:
            raised = error if self._broken is None else self._broken
            if self._broken is None and error is not self._of_call:
                self._note(error, replica)
            self._broken = raised
            if raised is error:
                raise
            raise raised from None
        finally:
            if outermost:
                forbidden_threads.pop(caller, None)
            self._end()
            self._is_running = False
            del self._play, self._results, self._context
        return results

    def meet(self, i: int, name: str, begin: Callable[[], JointCall], value: Any) -> Any:
        """Give a value to a call of all replicas, which the first one begins, and return the result of replica ``i``.

        An exception of the call is raised in each replica.
        """
        if self._broken is not None:
            raise ReplicaEnded
        self._names[i] = name
        if i == 0:
            return self._lead(name, begin, value)
        if not self._has_met:  # the first has made no call
            self._refuse(0, i)
        if name == self._names[0]:
            self._give(i, value)
        player = self._players[i - 1]
        player.may_run = False
        self._pass_on(i)
        while not player.may_run:
            player.gate.wait()
        if self._broken is not None:
            raise ReplicaEnded
        self._names[i] = ""
        result, error = player.result, player.error
        player.result = player.error = None
        if error is not None:
            raise error
        return result

    def _lead(self, name: str, begin: Callable[[], JointCall], value: Any) -> Any:
        """Make a call on the caller's thread, whose replica comes first and then lets each other one come."""
        lock, sequence = self._topology.lock, None
        self._fault: Exception | None = None
        self._call = call = begin()
        self._give(0, value)
        try:
            self._has_met = True
            self._let_all_run()
            for i, other in enumerate(self._names):  # when all have come, so that they stay in step
                if other != name:
                    self._refuse(0, i)
            with self._communicating():
                if self._fault is not None:
                    structures.refuse(name, self._topology, self._fault)
                    raise self._fault
                sequence = lock.sequence
                results = call.make()
        except BaseException as error:
            if sequence is not None and not isinstance(error, MismatchError):
                lock.left_call(name, error, sequence)
            if isinstance(error, Exception):
                self._of_call = error
                for player in self._players:
                    player.error = player.error or error
            raise
        finally:
            del self._call
            self._names[0] = ""
        for player, result in zip(self._players, results[1:], strict=True):
            player.result = result
        return results[0]

    def _give(self, i: int, value: Any) -> None:
        if self._fault is None:
            try:
                self._call.give(value)
            except Exception as error:  # raised by the call, once all have come
                self._note(error, i)
                self._fault = error

    def _let_all_run(self) -> None:
        """Let the others run, one after another, until each waits at a call or has ended. Raise if one fails."""
        if not self._players:
            self._players = [_Player(_idle.pop() if _idle else _Worker()) for _ in range(1, self._replicas.count)]
        try:
            self._pass_on(0)
            while self._running:
                self._gate.wait(True, _SIGNAL_SECONDS)
        except BaseException as error:  # of a signal handler, as at Ctrl-C
            self._broken = error
            interrupted = 0
            while self._running:
                if self._running != interrupted:
                    interrupted = self._running
                    player = self._players[interrupted - 1]
                    if not player.has_begun:
                        break
                    player.worker.interrupt(type(error))
                    for gate in (player.gate, player.worker.gate):  # the signal may have come before it was opened
                        gate.open()
                self._gate.wait(True, _SIGNAL_SECONDS)
            raise
        if self._broken is not None:
            raise ReplicaEnded

    def _pass_on(self, i: int) -> None:
        """Hand over from replica ``i`` to the next that has not ended, or after a failure to the caller's thread."""
        # Written out here: a function costs 3 us, cold. To bind the next thread to this core, and free it when it has
        # woken, saves the wait for an idle core. It costs 4 us, and on a busy machine the wait for this core: not done.
        self._running, gate = 0, self._gate
        if self._broken is None:
            for k, player in enumerate(self._players[i:], i + 1):
                if not player.has_ended:
                    self._running, gate = k, player.gate
                    player.may_run = True
                    if not player.has_begun:
                        player.worker.task = partial(self._context.copy().run, self._play_in_thread, k, player)
                        player.has_begun = True
                        gate = player.worker.gate
                    break
        gate.open()

    def _play_in_thread(self, i: int, player: _Player) -> None:
        try:
            forbidden_threads[threading.get_ident()] = _REFUSED
            with nullcontext() if self._settings is None else holding_settings(self._settings):
                self._results[i] = self._play(i)
        except ReplicaEnded:
            pass
        except BaseException as error:
            if error is not self._of_call:
                self._note(error, i)
            self._broken = self._broken or error
        finally:
            forbidden_threads.pop(threading.get_ident(), None)
            self._names[i] = ""
            player.has_ended = True
            self._pass_on(i)

    def _end(self) -> None:
        """End the replicas that wait at a call, and keep their threads."""
        for player in self._players:
            if player.has_begun and not player.has_ended:
                self._broken = self._broken or ReplicaEnded()
                player.may_run = True
                player.gate.open()
                while not player.has_ended:
                    self._gate.wait(True, _SIGNAL_SECONDS)
            if not player.worker.is_interrupted:
                _idle.append(player.worker)
        self._players = []

    @contextmanager
    def _communicating(self) -> Iterator[None]:
        lifted = forbidden_threads.get(self._caller) is _REFUSED
        if lifted:
            del forbidden_threads[self._caller]
        try:
            yield
        finally:
            if lifted:
                forbidden_threads[self._caller] = _REFUSED

    def _refuse(self, *which: int) -> NoReturn:
        """Raise on every rank for replicas of this one that are not in the same call."""
        doing = ", and ".join(map(self._doing, which))
        error = RuntimeError(f"the replicas of a rank must make the same calls in the same order: {doing}")
        with self._communicating():
            structures.refuse("run", self._topology, error)
        raise error

    def _doing(self, i: int) -> str:
        replica, name = self._replicas.first + i, self._names[i]
        if not name:
            return f"replica {replica} has ended"
        frame = None
        if self._has_met and i:
            frame = sys._current_frames().get(self._players[i - 1].worker.ident or 0)
        return f"replica {replica} calls {name}{call_site(frame)}"

    def _note(self, error: BaseException, i: int) -> None:
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(f"replica {self._replicas.first + i} of {self._replicas.size}")
