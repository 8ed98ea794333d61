"""Messages from one rank to another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from mpistrat.collectives.movement.exchange import messages
from mpistrat.integrations.torch import goodbyes
from mpistrat.integrations.torch.tensors import host_bytes, is_in_place, require_dense, require_rank, write
from mpistrat.integrations.torch.work import PendingWork
from mpistrat.process import mpi
from mpistrat.runtime.topology import Topology

# Messages of closed groups that MPI did not cancel. A receiver may still read their memory: it is kept until the end.
_left: list[tuple[Any, list[PendingWork]]] = []


class Messages:
    """The messages of a process group, on a communicator of their own. A wait may take so many seconds."""

    def __init__(self, topology: Topology, seconds: float):
        self._comm = topology.parent.Dup()
        self._step = topology.limits.message_bytes
        self._seconds = seconds
        self._works: list[PendingWork] = []
        MPI = mpi.start()
        self._any_source, self._largest_tag = MPI.ANY_SOURCE, self._comm.Get_attr(MPI.TAG_UB)
        self._in_job: list[int] = self._comm.allgather(MPI.COMM_WORLD.rank)

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> PendingWork:
        """Begin to send a tensor."""
        require_dense(tensor)
        require_rank("send", rank, self._comm.size)
        what = f"rank {self._comm.rank}: send of {_in_words(tensor)} to rank {rank} with tag {self._checked(tag)}"
        data = host_bytes(tensor)
        requests = [self._comm.Isend(piece, rank, tag) for piece in messages(data, self._step)]
        # The function keeps the bytes in memory until MPI has sent them.
        return self._kept(PendingWork(what, requests, lambda _: data, self._seconds, [tensor], self._ended(rank)))

    def receive(self, tensor: torch.Tensor, rank: int | None, tag: int) -> PendingWork:
        """Begin to receive a tensor from a rank, or from any (None).

        Raise NotImplementedError if the tensor is larger than one message and may come from any rank. `wait` raises
        ValueError if the message has another size, and RuntimeError if the rank has ended its program.
        """
        require_dense(tensor)
        if rank is not None:
            require_rank("receive", rank, self._comm.size)
        source = "any rank" if rank is None else f"rank {rank}"
        what = f"rank {self._comm.rank}: receive of {_in_words(tensor)} from {source} with tag {self._checked(tag)}"
        if rank is None and tensor.nbytes > self._step:
            raise NotImplementedError(
                f"{what}: more than {self._step} bytes can only be received from a rank that is named"
            )
        in_place = is_in_place(tensor)
        data = host_bytes(tensor) if in_place else np.empty(tensor.nbytes, np.uint8)
        pieces = messages(data, self._step)
        peer = self._any_source if rank is None else rank
        requests = [self._comm.Irecv(piece, peer, tag) for piece in pieces]

        def finish(statuses: Sequence[Any]) -> None:
            came = sum(status.Get_count(mpi.start().BYTE) for status in statuses)
            if came != len(data):
                raise ValueError(f"{what}: the message has {came} bytes, and the tensor {len(data)}")
            if not in_place:
                write(tensor, data)

        return self._kept(PendingWork(what, requests, finish, self._seconds, [tensor], self._ended(rank)))

    def _ended(self, rank: int | None) -> partial[bool]:
        """Return a function that tells whether a rank, or all others, have ended their programs."""
        others = [other for other in range(self._comm.size) if other != self._comm.rank]
        return partial(goodbyes.have_ended, [self._in_job[each] for each in (others if rank is None else [rank])])

    def _checked(self, tag: int) -> int:
        if not 0 <= tag <= self._largest_tag:
            raise ValueError(f"tag must be between 0 and {self._largest_tag} with this MPI library, not {tag}")
        return tag

    def _kept(self, work: PendingWork) -> PendingWork:
        # Kept until MPI is done with the memory, even if the program drops the handle.
        self._works = [each for each in self._works if not each.is_completed()]
        self._works.append(work)
        return work

    def close(self) -> None:
        """Cancel the messages that are not complete, and release the communicator. Collective."""
        left = [each for each in self._works if not each.give_up()]
        self._works = []
        if left:
            _left.append((self._comm, left))
        else:
            self._comm.Free()


def _in_words(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"
