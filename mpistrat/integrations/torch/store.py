"""The rendezvous of a torch program: MPI knows the ranks, and torch's key-value store works by messages of MPI.

Each rank has all keys. A rank that sets one sends it to the others. Rank 0 alone changes counters and compares values,
so that each change happens once; the others ask it. A rank reads messages inside the calls of the store: there is no
thread for it.

Ranks meet by ``init_method="mpistrat://"``. Without an ``init_method`` torch takes ``env://``, which reads RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Where one of these is not given, MPI answers instead of torch's error.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch
from torch.distributed import register_rendezvous_handler

from mpistrat.integrations.torch.new_groups import all_ranks
from mpistrat.integrations.torch.work import announce_ends, have_ended, wait_until
from mpistrat.process import mpi
from mpistrat.runtime.process_record import creation

_OWNER = 0
_TAG = 0  # on a communicator of its own
SCHEME = "mpistrat"
_Rendezvous = Iterator[tuple[Any, int, int]]
_stores: list[MpiStore] = []  # kept alive: torch's C++ keeps only its own part of a Python object


class MpiStore(torch.distributed.Store):
    """A store over MPI. It opens no port. Collective over ``comm`` when it is made.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        By default all ranks.

    Examples
    --------
    >>> store = MpiStore()
    >>> store.set("key", "value")
    >>> store.get("key"), store.add("count", 2)
    (b'value', 2)
    """

    def __init__(self, comm: Any = None):
        super().__init__()
        world = mpi.start().COMM_WORLD
        parent = world if comm is None else comm
        with creation(parent, "the start of a store of torch.distributed"):
            self._comm = parent.Dup()
            if parent.size == world.size:
                announce_ends(world)
            self._in_job: list[int] = self._comm.allgather(world.rank)
        self._values: dict[str, bytes] = {}
        self._answers: dict[int, bytes] = {}
        self._request_number = 0
        self._sent: list[Any] = []  # requests of messages

    # --- what torch calls ------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key on all ranks."""
        self._read()
        self._apply_on_all("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        """Wait until a key is set, and return its value."""
        self.wait([key])
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        """Add to a counter and return its new value. Waits until rank 0 makes a call of the store."""
        return int(self._by_owner("add", key, value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if it has the expected value; return its value then."""
        return self._by_owner("compare_set", key, _bytes(expected), _bytes(desired))

    def delete_key(self, key: str) -> bool:
        """Delete a key on all ranks. Return whether this rank knew it."""
        self._read()
        known = key in self._values
        self._apply_on_all("delete", key, b"")
        return known

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set."""
        self._read()
        return all(key in self._values for key in keys)

    def num_keys(self) -> int:
        """Return the number of keys."""
        self._read()
        return len(self._values)

    def list_keys(self) -> list[str]:
        """Return the keys."""
        self._read()
        return sorted(self._values)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set.

        Raise TimeoutError if that takes longer than ``timeout``, by default the store's, and RuntimeError if all other
        ranks have ended their programs.
        """
        limit = self.timeout if timeout is None else timeout

        def unset() -> str:
            return f"the keys {[key for key in keys if key not in self._values]} were not set"

        others = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
        self._wait_until(lambda: self.check(keys), unset, others, limit.total_seconds())

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key."""
        self._by_owner("append", key, _bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait until all keys are set, and return their values."""
        self.wait(keys)
        return [self._values[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Return that the store has `append`, `multi_get` and `multi_set`."""
        return True

    def clone(self) -> MpiStore:
        """Return this store: its ranks read their messages once."""
        return self

    # The names by which torch's C++ calls a store written in Python.
    deleteKey, getNumKeys = delete_key, num_keys

    # --- messages --------------------------------------------------------------------

    def _apply_on_all(self, kind: str, key: str, value: bytes) -> None:
        self._apply(kind, key, value)
        for rank in range(self._comm.size):
            if rank != self._comm.rank:
                self._send((kind, key, value), rank)

    def _send(self, message: tuple[Any, ...], rank: int) -> None:
        # The request of `isend` owns the pickled message, which must live until MPI has sent it.
        self._sent = [request for request in self._sent if not request.Test()]
        self._sent.append(self._comm.isend(message, rank, _TAG))

    def _read(self) -> None:
        """Read all messages that have come."""
        for source, (kind, *content) in mpi.messages(self._comm, _TAG):
            if kind == "ask":
                number, *request = content
                self._send(("answer", number, self._as_owner(*request)), source)
            elif kind == "answer":
                number, value = content
                self._answers[number] = value
            else:
                self._apply(kind, *content)

    def _apply(self, kind: str, key: str, value: bytes) -> None:
        if kind == "set":
            self._values[key] = value
        else:
            self._values.pop(key, None)

    def _by_owner(self, kind: str, key: str, *operands: Any) -> bytes:
        if self._comm.rank == _OWNER:
            self._read()
            return self._as_owner(kind, key, *operands)
        self._request_number += 1
        self._send(("ask", self._request_number, kind, key, *operands), _OWNER)

        def answered() -> bool:
            self._read()
            return self._request_number in self._answers

        def unanswered() -> str:
            return f"rank {_OWNER} must make a call, and did not answer {kind}({key!r})"

        self._wait_until(answered, unanswered, [_OWNER], self.timeout.total_seconds())
        return self._answers.pop(self._request_number)

    def _as_owner(self, kind: str, key: str, *operands: Any) -> bytes:
        """Change a key on all ranks and return its new value. On rank 0 only."""
        before = self._values.get(key)
        if kind == "add":
            value = str(int(before or 0) + operands[0]).encode()
        elif kind == "append":
            value = (before or b"") + operands[0]
        else:
            expected, desired = operands
            if before != expected and not (before is None and not expected):
                return expected if before is None else before
            value = desired
        self._apply_on_all("set", key, value)
        return value

    def _wait_until(self, done: Callable[[], bool], problem: Callable[[], str], ranks: list[int], limit: float) -> None:
        """Wait until ``done()``, which depends on these ranks, or raise an error with the text ``problem()``."""
        wait_until(
            done,
            lambda: have_ended(self._in_job[rank] for rank in ranks),
            lambda: f"rank {self._comm.rank}: the store of torch.distributed: {problem()}",
            limit,
            f" before these ranks ended their programs: {ranks}",
        )


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def register() -> None:
    """Register the scheme, and let ``env://`` fall back to it."""
    register_rendezvous_handler(SCHEME, _by_mpi)
    # torch has no public way to choose the rendezvous of a backend: init_process_group knows the backend, the
    # rendezvous only the scheme. A torch without this private table needs init_method="mpistrat://".
    module = importlib.import_module("torch.distributed.rendezvous")  # its name in the package is a function
    handlers = getattr(module, "_rendezvous_handlers", {})
    if "env" in handlers:
        handlers["env"] = _or_mpi(handlers["env"])


def _or_mpi(by_environment: Callable[..., _Rendezvous]) -> Callable[..., _Rendezvous]:
    def handler(url: str, **options: Any) -> _Rendezvous:
        in_url = {"RANK" if name == "rank" else name.upper() for name in parse_qs(urlparse(url).query)}
        needed = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
        return (by_environment if needed <= in_url | set(os.environ) else _by_mpi)(url, **options)

    return handler


def _by_mpi(url: str, **options: Any) -> _Rendezvous:
    """Yield the store, the rank and the number of ranks. Collective over all ranks."""
    comm = all_ranks()
    for name, value in (("rank", comm.rank), ("world_size", comm.size)):
        for text in parse_qs(urlparse(url).query).get(name, ()):
            if int(text) != value:
                raise ValueError(
                    f"init_process_group was given {name}={text}, and MPI has {value}: leave rank and world_size out"
                )
    _stores.append(MpiStore(comm))
    yield _stores[-1], comm.rank, comm.size
    raise RuntimeError("ranks of MPI cannot meet a second time: the number of ranks is fixed at the start")
