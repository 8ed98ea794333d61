"""How the ranks of a torch program find each other: MPI tells them.

``init_method="mpistrat://"`` is the explicit form. Without an ``init_method`` torch takes ``env://``, which reads RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Where one of these is not given, MPI answers instead of torch's error.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlparse

from torch.distributed import register_rendezvous_handler

from mpistrat.integrations.torch.new_groups.communicators import all_ranks
from mpistrat.integrations.torch.store import MpiStore

SCHEME = "mpistrat"
_Found = Iterator[tuple[Any, int, int]]
_stores: list[MpiStore] = []  # torch's C++ keeps only its part of an object of Python


def register() -> None:
    """Register the scheme, and let ``env://`` fall back to it."""
    register_rendezvous_handler(SCHEME, _by_mpi)
    # torch has no public way to say how ranks meet if a program says nothing: init_process_group knows the backend,
    # its rendezvous only the scheme. A torch without this table needs init_method="mpistrat://".
    module = importlib.import_module("torch.distributed.rendezvous")  # its name in the package is a function
    handlers = getattr(module, "_rendezvous_handlers", {})
    if "env" in handlers:
        handlers["env"] = _or_mpi(handlers["env"])


def _or_mpi(by_environment: Callable[..., _Found]) -> Callable[..., _Found]:
    def handler(url: str, **options: Any) -> _Found:
        given = {"RANK" if name == "rank" else name.upper() for name in parse_qs(urlparse(url).query)}
        needed = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
        return (by_environment if needed <= given | set(os.environ) else _by_mpi)(url, **options)

    return handler


def _by_mpi(url: str, **options: Any) -> _Found:
    """Yield the store, the rank and the number of ranks. Collective over all ranks."""
    comm = all_ranks()
    for name, value in (("rank", comm.rank), ("world_size", comm.size)):
        for given in parse_qs(urlparse(url).query).get(name, ()):
            if int(given) != value:
                raise ValueError(
                    f"init_process_group was given {name}={given}, and MPI has {value}: leave rank and world_size out"
                )
    _stores.append(MpiStore(comm))
    yield _stores[-1], comm.rank, comm.size
    raise RuntimeError("ranks of MPI cannot meet a second time: the number of ranks is fixed at the start")
