"""The process group that torch calls: its messages, and the methods that torch calls on any group."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from mpistrat.collectives import CollectiveAllReduce, CommunicationOptions, structures
from mpistrat.collectives.movement.moves import cut_into_messages
from mpistrat.integrations.torch.collectives import GroupCollectives
from mpistrat.integrations.torch.new_groups import part_of
from mpistrat.integrations.torch.tensors import host_bytes, is_in_place, require_dense, require_rank, write
from mpistrat.integrations.torch.work import Done, PendingWork, announce_ends, have_ended
from mpistrat.process import mpi
from mpistrat.runtime.topology import Topology
from mpistrat.verify import watch

# Messages of closed groups that MPI did not cancel. A receiver may still read their memory: it is kept until the end.
_left: list[tuple[Any, Any, list[PendingWork]]] = []
# The numbers of dtypes in notes; sorted by name, so that they are the same on all ranks.
_DTYPES = sorted({dtype for name in dir(torch) if isinstance(dtype := getattr(torch, name), torch.dtype)}, key=str)
_NUMBER_OF = {dtype: number for number, dtype in enumerate(_DTYPES)}
_SHORTEST = 0.001  # seconds, the least time limit: 0 would mean no limit


class Messages:
    """The messages of a process group, on communicators of their own. A wait may take ``seconds``.

    A note with the dtype and size goes before each message: MPI itself would deliver the bytes of another dtype. Notes
    arrive in the order of the messages. They have a communicator of their own, since a receive from any rank would
    match them.
    """

    def __init__(self, topology: Topology, seconds: float):
        self._comm, self._notes = topology.parent.Dup(), topology.parent.Dup()
        self._step = topology.limits.message_bytes
        self._seconds = seconds
        self._works: list[PendingWork] = []
        MPI = mpi.start()
        # TAG_UB of COMM_WORLD: Open MPI does not have this attribute on a communicator that was split off.
        self._any_source, self._largest_tag = MPI.ANY_SOURCE, MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
        self._in_job: list[int] = self._comm.allgather(MPI.COMM_WORLD.rank)

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> PendingWork:
        """Begin to send a tensor."""
        require_dense(tensor)
        require_rank("send", rank, self._comm.size)
        call = f"rank {self._comm.rank}: send of {_in_words(tensor)} to rank {rank} with tag {self._checked(tag)}"
        data = host_bytes(tensor)
        requests = [self._notes.Isend(_note(tensor.dtype, len(data)), rank, tag)]
        requests += [self._comm.Isend(piece, rank, tag) for piece in cut_into_messages(data, self._step)]
        # The function keeps the bytes in memory until MPI has sent them.
        return self._kept(PendingWork(call, requests, lambda _: data, self._seconds, [tensor], self._ended(rank)))

    def receive(self, tensor: torch.Tensor, rank: int | None, tag: int) -> PendingWork:
        """Begin to receive a tensor from a rank, or from any (None).

        Raise NotImplementedError if the tensor is larger than one message and may come from any rank. `wait` raises
        TypeError if the message has another dtype, ValueError if it has another size, and RuntimeError if the rank has
        ended its program.
        """
        require_dense(tensor)
        if rank is not None:
            require_rank("receive", rank, self._comm.size)
        source = "any rank" if rank is None else f"rank {rank}"
        call = f"rank {self._comm.rank}: receive of {_in_words(tensor)} from {source} with tag {self._checked(tag)}"
        if rank is None and tensor.nbytes > self._step:
            raise NotImplementedError(f"{call}: more than {self._step} bytes can only be received from a named rank")
        in_place = is_in_place(tensor)
        data = host_bytes(tensor) if in_place else np.empty(tensor.nbytes, np.uint8)
        peer = self._any_source if rank is None else rank
        requests = [self._comm.Irecv(piece, peer, tag) for piece in cut_into_messages(data, self._step)]

        def finish(statuses: Sequence[Any]) -> None:
            note = np.empty(2, np.int64)
            sender = statuses[0].source if rank is None else rank
            self._notes.Recv(note, sender, tag)  # does not wait: it was sent before the message
            number, came = note.tolist()
            # Open MPI 5.0 writes a message of more than 4 KiB from the same node as a whole, before it says that it
            # is too long: memory behind the tensor is lost.
            behind = "; MPI may have written the rest behind the tensor: end the program" if came > len(data) else ""
            if _DTYPES[number] is not tensor.dtype:
                raise TypeError(f"{call}: the message of rank {sender} has {came} bytes of {_DTYPES[number]}{behind}")
            if came != len(data):
                raise ValueError(f"{call}: the message has {came} bytes, and the tensor {len(data)}{behind}")
            if not in_place:
                write(tensor, data)

        work = PendingWork(call, requests, finish, self._seconds, [tensor], self._ended(rank))
        work.source_and_tag = peer, tag
        either = {peer, self._any_source}
        work.earlier = [
            other
            for other in self._works
            if other.source_and_tag[1] == tag and (rank is None or other.source_and_tag[0] in either)
        ]
        return self._kept(work)

    def _ended(self, rank: int | None) -> partial[bool]:
        """Return a function that tells whether a rank, or all others, have ended their programs."""
        others = [other for other in range(self._comm.size) if other != self._comm.rank]
        return partial(have_ended, [self._in_job[other] for other in (others if rank is None else [rank])])

    def _checked(self, tag: int) -> int:
        if not 0 <= tag <= self._largest_tag:
            raise ValueError(f"tag must be between 0 and {self._largest_tag} with this MPI library, not {tag}")
        return tag

    def _kept(self, work: PendingWork) -> PendingWork:
        # Kept until MPI is done with the memory, even if the program drops the handle.
        self._works = [pending for pending in self._works if not pending.is_completed()]
        self._works.append(work)
        return work

    def close(self) -> None:
        """Cancel the messages that are not complete, and release the communicators. Collective."""
        left = [work for work in self._works if not work.give_up()]
        self._works = []
        if left:
            _left.append((self._comm, self._notes, left))
        else:
            self._comm.Free()
            self._notes.Free()


@lru_cache(maxsize=1024)
def _note(dtype: torch.dtype, nbytes: int) -> np.ndarray:
    return np.array([_NUMBER_OF[dtype], nbytes], np.int64)


def _in_words(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"


class DescribedGroup(torch.distributed.ProcessGroup):
    """A process group without collectives. ``name`` is torch's."""

    def __init__(self, rank: int, size: int, name: str):
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._name, self._description = name, ""

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return "mpistrat"

    def getRank(self) -> int:
        """Return the rank in this group."""
        return self._rank

    def getSize(self) -> int:
        """Return the number of ranks of this group."""
        return self._size

    rank, size, name = getRank, getSize, getBackendName

    def setGroupName(self, name: str) -> None:
        """Set torch's name of the group."""
        self._name = name

    def getGroupName(self) -> str:
        """Return torch's name of the group."""
        return self._name

    def setGroupDesc(self, description: str) -> None:
        """Set torch's description of the group."""
        self._description = description

    def getGroupDesc(self) -> str:
        """Return torch's description of the group."""
        return self._description

    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    # torch asks a group for its devices, and for the backend of a device. A group in Python is its own backend, and
    # the C++ part would know neither.

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.device_count() else [])]

    def _get_backend(self, device: torch.device) -> DescribedGroup:
        return self

    supports_coalescing = supports_time_estimate = False
    supports_splitting = True

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Return at once: the ranks of a group are connected."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Return at once: a new group needs its members alone."""

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: torch allocates what FSDP sends."""
        return False

    def __repr__(self) -> str:
        return f"<mpistrat ProcessGroup {self._name!r}: rank {self.rank()} of {self.size()}>"


class ProcessGroup(GroupCollectives, DescribedGroup):
    """A process group of ``torch.distributed`` over MPI.

    Every collective is complete when its call returns. Its handle, if the program asks for one, is complete, too.
    Ranks that make different collectives, or with other shapes or dtypes, raise `MismatchError` on every rank.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Its ranks. Collective over them.
    name : str
        Torch's name of the group.
    timeout : datetime.timedelta
        How long collectives wait for other ranks. Torch's default of 30 minutes does not limit collectives: MPI ends
        the job of a rank that fails.
    options : CommunicationOptions, optional
        Of all reductions.

    Examples
    --------
    >>> import torch.distributed as dist
    >>> dist.init_process_group("mpistrat")  # doctest: +SKIP
    """

    def __init__(
        self,
        comm: Any,
        name: str = "",
        timeout: timedelta = default_pg_timeout,
        options: CommunicationOptions | None = None,
    ):
        super().__init__(comm.rank, comm.size, name)
        topology = Topology.of(comm)
        with structures.refusals("process group", topology):
            if not isinstance(options, CommunicationOptions | None):
                raise TypeError(
                    f"pg_options must be mpistrat.experimental.CommunicationOptions, not {type(options).__name__}"
                )
        structures.agree(topology, "process group")
        options = options or CommunicationOptions()
        self._comm, self._options = comm, options
        self._is_world = comm == mpi.start().COMM_WORLD
        if self._is_world:
            announce_ends(comm)
        seconds = timeout.total_seconds()
        limit = options.timeout_seconds
        if limit is None and timeout != default_pg_timeout:
            limit = seconds
        self.topology: Topology = topology.limited(limit)
        options = options.merge(CommunicationOptions(timeout_seconds=limit))
        self._of_reductions = options
        watch(self.topology)
        self._ops = CollectiveAllReduce().bound_to(self.topology)
        self._messages: Messages | None = Messages(topology, seconds)

    # --- the end ---------------------------------------------------------------------

    def shutdown(self) -> None:
        """Cancel messages in flight and release the communicators. Collective over the group."""
        if self._messages is not None:
            self._messages.close()
            self._messages = None
            if not self._is_world:
                self._comm.Free()  # and with it the topology

    abort = shutdown

    def _open(self) -> Messages:
        if self._messages is None:
            raise RuntimeError(f"rank {self.rank()}: the process group {self._name!r} was destroyed")
        return self._messages

    @property
    def open_topology(self) -> Topology:
        """The topology of the group. Raise RuntimeError if the group was destroyed."""
        self._open()
        return self.topology

    # --- parts -----------------------------------------------------------------------

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: CommunicationOptions | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[Any] | None = None,
    ) -> ProcessGroup | None:
        """Make a group of some ranks of this one; None on a rank that is not among them. Collective over this group.

        Parameters
        ----------
        new_ranks : sequence of int
            Ranks of this group. Ranks may give different ones: each member of a part gives that part.
        timeout, opts, group_name, group_desc
            Of the new group; by default the timeout of torch, and the options of this group.
        device_types
            Ignored: one group serves all devices.

        Raises
        ------
        MismatchError
            If members of a part give different ones. All ranks of this group raise.
        """
        self._open()
        comm = part_of(self._comm, self.topology, new_ranks)
        if comm is None:
            return None
        group = ProcessGroup(comm, group_name or "", timeout or default_pg_timeout, opts or self._options)
        group.setGroupDesc(group_desc or "")
        return group

    # --- messages and barriers -------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int = 0) -> PendingWork:
        """Begin to send a tensor to a rank of the group."""
        (tensor,) = tensors
        return self._open().send(tensor, rank, tag)

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int = 0) -> PendingWork:
        """Begin to receive a tensor from a rank of the group."""
        (tensor,) = tensors
        return self._open().receive(tensor, rank, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> PendingWork:
        """Begin to receive a tensor from any rank of the group."""
        (tensor,) = tensors
        return self._open().receive(tensor, None, tag)

    def barrier(self, opts: Any = None) -> Done:
        """Wait for all ranks."""
        self._open()
        self.topology.barrier()
        return Done([])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks, or raise a TimeoutError that names those that did not come."""
        self._open()
        limit = self.topology.lock.timeout_seconds if timeout is None else max(timeout.total_seconds(), _SHORTEST)
        self.topology.limited(limit).barrier()
