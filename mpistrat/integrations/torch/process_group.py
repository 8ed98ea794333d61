"""The process group that torch calls: torch's signatures over the collectives of this library."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from mpistrat.collectives import CommunicationOptions, structures
from mpistrat.integrations.torch import goodbyes
from mpistrat.integrations.torch.moves import Moves
from mpistrat.integrations.torch.new_groups import part_of
from mpistrat.integrations.torch.point_to_point import Messages
from mpistrat.integrations.torch.reductions import TensorReductions, op_of
from mpistrat.integrations.torch.tensors import require_rank, write_each
from mpistrat.integrations.torch.work import Done, PendingWork
from mpistrat.process import mpi
from mpistrat.runtime.topology import Topology

_SHORTEST = 0.001  # seconds of a limit: 0 would be none


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


class ProcessGroup(DescribedGroup):
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
            goodbyes.begin(comm)
        seconds = timeout.total_seconds()
        limit = options.timeout_seconds
        if limit is None and timeout != default_pg_timeout:
            limit = seconds
        self.topology: Topology = topology.limited(limit)
        options = options.merge(CommunicationOptions(timeout_seconds=limit))
        self._reductions = TensorReductions(self.topology, options)
        self._moves = Moves(self.topology)
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

    def _open_reductions(self) -> TensorReductions:
        self._open()
        return self._reductions

    def _open_moves(self) -> Moves:
        self._open()
        return self._moves

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
        part = ProcessGroup(comm, group_name or "", timeout or default_pg_timeout, opts or self._options)
        part.setGroupDesc(group_desc or "")
        return part

    # --- reductions ------------------------------------------------------------------

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Done:
        """Combine a tensor over all ranks, in place."""
        return self._all_reduce("all_reduce", list(tensors), op_of(opts))

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Done:
        """Combine tensors over all ranks, in place, in as few messages as possible."""
        return self._all_reduce("all_reduce_coalesced", list(tensors), op_of(opts))

    def average_buffer(self, buffer: np.ndarray) -> None:
        """Average an array in an arena over all ranks, in place."""
        self._open_reductions().average_buffer(buffer)

    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Done:
        """Combine a tensor over all ranks. Only the root's is written to."""
        self._open()
        with structures.refusals("reduce", self.topology):
            require_rank("reduce", opts.rootRank, self.size())
        totals = self._reductions.combined(f"reduce to rank {opts.rootRank}", list(tensors), opts.reduceOp)
        if self.rank() == opts.rootRank:
            write_each(tensors, totals)
        return Done(list(tensors))

    def _all_reduce(self, name: str, tensors: list[Tensor], op: Any) -> Done:
        write_each(tensors, self._open_reductions().combined(name, tensors, op, in_place=True))
        return Done(tensors)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> Done:
        """Combine a list of tensors, one for each rank, and return each to its rank."""
        for output, parts in zip(outputs, inputs, strict=True):
            self._open_reductions().reduce_scatter_parts(output, list(parts), op_of(opts))
        return Done(list(outputs))

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Done:
        """Combine a tensor, and return a part of it to each rank."""
        self._open_reductions().reduce_scatter(output, tensor, op_of(opts))
        return Done([output])

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Done:
        """Combine and scatter several tensors, one after the other."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self._open_reductions().reduce_scatter(output, tensor, op_of(opts))
        return Done(list(outputs))

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # --- moves -----------------------------------------------------------------------

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Done:
        """Copy the tensors of a rank to all ranks."""
        self._open_moves().broadcast(list(tensors), opts.rootRank)
        return Done(list(tensors))

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Done:
        """Gather a tensor of each rank, in a list. The tensors of different ranks may differ in size."""
        for parts, tensor in zip(outputs, inputs, strict=True):
            self._open_moves().all_gather(list(parts), tensor)
        return Done([part for parts in outputs for part in parts])

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Done:
        """Gather a tensor of each rank, one behind the other in one tensor."""
        self._open_moves().all_gather_single(output, tensor)
        return Done([output])

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Done:
        """Gather several tensors, one after the other."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self._open_moves().all_gather_single(output, tensor)
        return Done(list(outputs))

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Done:
        """Gather several tensors; ``outputs[rank][i]`` takes the tensor ``i`` of a rank."""
        for i, tensor in enumerate(inputs):
            self._open_moves().all_gather([parts[i] for parts in outputs], tensor)
        return Done([part for parts in outputs for part in parts])

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> Done:
        """Gather a tensor of each rank in a list of one rank."""
        (tensor,) = inputs
        parts = list(outputs[0]) if outputs else []
        self._open_moves().to_or_from_one("gather", parts, tensor, opts.rootRank)
        return Done(parts)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> Done:
        """Send each rank a tensor of a list of one rank."""
        (tensor,) = outputs
        parts = list(inputs[0]) if inputs else []
        self._open_moves().to_or_from_one("scatter", parts, tensor, opts.rootRank)
        return Done([tensor])

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Done:
        """Send tensor ``i`` of a list to rank ``i``."""
        self._open_moves().all_to_all(list(outputs), list(inputs))
        return Done(list(outputs))

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_sizes: Sequence[int] | None,
        input_sizes: Sequence[int] | None,
        opts: Any = None,
    ) -> Done:
        """Send consecutive rows of a tensor to rank 0, 1, and so on: equally many, or so many as the sizes say."""
        self._open_moves().all_to_all_single(output, tensor, output_sizes, input_sizes)
        return Done([output])

    alltoall_base = all_to_all_single

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
        limit = (
            self.topology.lock.timeout_seconds if timeout is None else max(timeout.total_seconds(), _SHORTEST)
        )
        self.topology.limited(limit).barrier()
