"""The process group that torch calls: torch's signatures over the collectives of this library."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from mpistrat.collectives import CommunicationOptions, structures
from mpistrat.collectives.movement import all_gather, broadcast
from mpistrat.collectives.movement.exchange import exchange
from mpistrat.integrations.torch import goodbyes
from mpistrat.integrations.torch.checks import require, require_dtype, require_one_for_each_rank
from mpistrat.integrations.torch.described_group import DescribedGroup
from mpistrat.integrations.torch.point_to_point import Messages
from mpistrat.integrations.torch.reduce_ops import op_of
from mpistrat.integrations.torch.reductions import Reductions
from mpistrat.integrations.torch.tensors import host_array, host_bytes, room, write, write_all, write_bytes
from mpistrat.integrations.torch.work import Done, InFlight
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.agreement.whole_call import whole
from mpistrat.runtime.process import mpi
from mpistrat.runtime.topology import Topology

_collective = whole(attrgetter("topology"))


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
        if not isinstance(options, CommunicationOptions | None):
            raise TypeError(
                f"pg_options must be mpistrat.experimental.CommunicationOptions, not {type(options).__name__}"
            )
        options = options or CommunicationOptions()
        self._own_comm = None if comm == mpi.start().COMM_WORLD else comm
        topology = Topology.of(comm)
        if self._own_comm is None:
            goodbyes.begin(comm)
        seconds = timeout.total_seconds()
        limit = options.timeout_seconds
        if limit is None and timeout != default_pg_timeout:
            limit = seconds
        self.topology: Topology = topology.limited(limit)
        options = options.merge(CommunicationOptions(timeout_seconds=limit))
        self._reductions = Reductions(self.topology, options)
        self._messages: Messages | None = Messages(topology, seconds)

    # --- the end ---------------------------------------------------------------------

    def shutdown(self) -> None:
        """Cancel messages in flight and release the communicators. Collective over the group."""
        if self._messages is not None:
            self._messages.close()
            self._messages = None
            if self._own_comm is not None:
                self._own_comm.Free()  # and with it the topology

    abort = shutdown

    def _open(self) -> Messages:
        if self._messages is None:
            raise RuntimeError(f"rank {self.rank()}: the process group {self._name!r} was destroyed")
        return self._messages

    def _open_reductions(self) -> Reductions:
        self._open()
        return self._reductions

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
        totals = self._open_reductions().combined(
            f"reduce to rank {opts.rootRank}", list(tensors), opts.reduceOp
        )
        if self.rank() == opts.rootRank:
            write_all(tensors, totals)
        return Done(list(tensors))

    def _all_reduce(self, name: str, tensors: list[Tensor], op: Any) -> Done:
        write_all(tensors, self._open_reductions().combined(name, tensors, op, in_place=True))
        return Done(tensors)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> Done:
        """Combine a list of tensors, one for each rank, and return each to its rank."""
        for output, parts in zip(outputs, inputs, strict=True):
            self._reduce_scatter(output, list(parts), op_of(opts))
        return Done(list(outputs))

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Done:
        """Combine a tensor, and return a part of it to each rank."""
        self._reduce_scatter_single(output, tensor, op_of(opts))
        return Done([output])

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Done:
        """Combine and scatter several tensors, one after the other."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self._reduce_scatter_single(output, tensor, op_of(opts))
        return Done(list(outputs))

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @_collective
    def _reduce_scatter(self, output: Tensor, parts: list[Tensor], op: Any) -> None:
        self._open()
        with structures.refusals("reduce_scatter", self.topology):
            require_one_for_each_rank("reduce_scatter", "input", parts, self.size())
            require(
                output.numel() == parts[self.rank()].numel(),
                f"reduce_scatter: the output has {output.numel()} elements, and input {self.rank()} "
                f"{parts[self.rank()].numel()}",
            )
            require_dtype("reduce_scatter", output, *parts)
            hosts = [host_array(part).reshape(-1) for part in parts]
        if len(set(map(len, hosts))) == 1:
            self._reductions.scattered(output, np.stack(hosts), op)
            return
        joined = torch.cat([part.detach().reshape(-1) for part in parts])
        (total,) = self._reductions.combined("reduce_scatter", [joined], op)
        start = sum(map(len, hosts[: self.rank()]))
        write(output, total[start : start + output.numel()])

    @_collective
    def _reduce_scatter_single(self, output: Tensor, tensor: Tensor, op: Any) -> None:
        self._open()
        with structures.refusals("reduce_scatter", self.topology):
            require(
                output.numel() * self.size() == tensor.numel(),
                f"reduce_scatter: {tensor.numel()} elements do not make {self.size()} parts of {output.numel()}",
            )
            require_dtype("reduce_scatter", output, tensor)
            rows = host_array(tensor).reshape(self.size(), output.numel())
        self._reductions.scattered(output, rows, op)

    # --- moves -----------------------------------------------------------------------

    @_collective
    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Done:
        """Copy the tensors of a rank to all ranks."""
        self._open()
        with structures.refusals("broadcast", self.topology):
            hosts = [host_array(tensor) for tensor in tensors]
        found = broadcast.broadcast(self.topology, hosts, root=opts.rootRank)
        if self.rank() != opts.rootRank:
            write_all(tensors, found)
        return Done(list(tensors))

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Done:
        """Gather a tensor of each rank, in a list. The tensors of different ranks may differ in size."""
        for parts, tensor in zip(outputs, inputs, strict=True):
            self._all_gather(list(parts), tensor)
        return Done([part for parts in outputs for part in parts])

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Done:
        """Gather a tensor of each rank, one behind the other in one tensor."""
        self._all_gather_single(output, tensor)
        return Done([output])

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Done:
        """Gather several tensors, one after the other."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self._all_gather_single(output, tensor)
        return Done(list(outputs))

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Done:
        """Gather several tensors; ``outputs[rank][i]`` takes the tensor ``i`` of a rank."""
        for i, tensor in enumerate(inputs):
            self._all_gather([parts[i] for parts in outputs], tensor)
        return Done([part for parts in outputs for part in parts])

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @_collective
    def _all_gather_single(self, output: Tensor, tensor: Tensor) -> None:
        self._open()
        with structures.refusals("all_gather", self.topology):
            require(
                output.numel() == self.size() * tensor.numel(),
                f"all_gather: the output has {output.numel()} elements, and {self.size()} inputs of {tensor.numel()} "
                f"have {self.size() * tensor.numel()}",
            )
            require_dtype("all_gather", output, tensor)
            row = host_array(tensor).reshape(1, tensor.numel())
        write(output, all_gather.all_gather(self.topology, row, 0))

    @_collective
    def _all_gather(self, outputs: list[Tensor], tensor: Tensor) -> None:
        self._open()
        with structures.refusals("all_gather", self.topology):
            require_one_for_each_rank("all_gather", "output", outputs, self.size())
            require_dtype("all_gather", tensor, *outputs)
            flat = host_array(tensor).reshape(-1)
            lengths = [output.numel() for output in outputs]
        if set(lengths) == {len(flat)}:
            rows = all_gather.all_gather(self.topology, flat.reshape(1, -1), 0)
            write_all(outputs, list(rows))
            return
        # Every rank sees what all others expect and send: all raise, or none.
        # Three axes: rows of int64 that a rank gathers have two, and would pass for lengths.
        own = np.array([[[*lengths, len(flat)]]], np.int64)
        told = all_gather.all_gather(self.topology, own, 0)[:, 0]
        if (told[:, :-1] != told[:, -1]).any():
            raise ValueError(
                f"all_gather: the ranks send {told[:, -1].tolist()} elements, and have outputs for "
                f"{told[:, :-1].tolist()} (a list for each rank)"
            )
        joined = all_gather.all_gather(self.topology, flat, 0)
        write_all(outputs, np.split(joined, np.cumsum(lengths)[:-1]))

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> Done:
        """Gather a tensor of each rank in a list of one rank."""
        (tensor,) = inputs
        parts = list(outputs[0]) if outputs else []
        self._to_or_from_one("gather", parts, tensor, opts.rootRank)
        return Done(parts)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> Done:
        """Send each rank a tensor of a list of one rank."""
        (tensor,) = outputs
        self._to_or_from_one("scatter", list(inputs[0]) if inputs else [], tensor, opts.rootRank)
        return Done([tensor])

    @_collective
    def _to_or_from_one(self, name: str, parts: list[Tensor], tensor: Tensor, root: int) -> None:
        """Gather ``tensor`` of all ranks in ``parts`` of the root, or scatter these."""
        self._open()
        is_root, gathers = self.rank() == root, name == "gather"
        with structures.refusals(name, self.topology):
            if is_root:
                require_one_for_each_rank(name, "output" if gathers else "input", parts, self.size())
                require_dtype(name, tensor, *parts)
                for part in parts:
                    require(
                        part.numel() == tensor.numel(),
                        f"{name}: a tensor of the list has {part.numel()} elements, and the other {tensor.numel()}",
                    )
            many: list[np.ndarray | None] = [None] * self.size()
            one: list[np.ndarray | None] = [None] * self.size()
            if gathers:
                one[root] = host_bytes(tensor)
                many = [room(part) for part in parts] if is_root else many
            else:
                one[root] = room(tensor)
                many = [host_bytes(part) for part in parts] if is_root else many
        with self.topology.turn(operation(name, root, (str(tensor.dtype), tuple(tensor.shape)))):
            exchange(self.topology, *((one, many) if gathers else (many, one)))
        if gathers:
            write_bytes(parts, many)
        else:
            write_bytes([tensor], [one[root]])

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Done:
        """Send tensor ``i`` of a list to rank ``i``."""
        self._all_to_all(list(outputs), list(inputs))
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
        with structures.refusals("all_to_all", self.topology):
            received = self._cut(output, output_sizes)
            sent = self._cut(tensor, input_sizes)
        self._all_to_all(received, sent)
        return Done([output])

    alltoall_base = all_to_all_single

    def _cut(self, tensor: Tensor, sizes: Sequence[int] | None) -> list[Tensor]:
        if not sizes:
            require(
                tensor.dim() > 0 and len(tensor) % self.size() == 0,
                f"all_to_all: {len(tensor) if tensor.dim() else 0} rows cannot be divided among {self.size()} ranks: "
                "give split sizes",
            )
            sizes = [len(tensor) // self.size()] * self.size()
        require(
            len(sizes) == self.size() and sum(sizes) == len(tensor),
            f"all_to_all: split sizes {list(sizes)} do not make {len(tensor)} rows for {self.size()} ranks",
        )
        return list(torch.split(tensor.detach(), list(sizes)))

    @_collective
    def _all_to_all(self, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        self._open()
        with structures.refusals("all_to_all", self.topology):
            require_one_for_each_rank("all_to_all", "output", outputs, self.size())
            require_one_for_each_rank("all_to_all", "input", inputs, self.size())
            require_dtype("all_to_all", *outputs, *inputs)
            sends = [host_bytes(tensor) for tensor in inputs]
            receives = [room(tensor) for tensor in outputs]
        expected = np.array(list(map(len, receives)), np.int64)
        announced = np.empty_like(expected)
        topology, world = self.topology, self.topology.world
        with topology.turn(operation("all_to_all", str(inputs[0].dtype))):
            world.Alltoall(np.array(list(map(len, sends)), np.int64), announced)
            wrong = np.flatnonzero(announced != expected)
            text = ""
            if len(wrong):
                other = int(wrong[0])
                text = (
                    f"rank {topology.rank} expects {expected[other]} bytes of rank {other}, which sends "
                    f"{announced[other]}"
                )
            texts = world.allgather(text) if world.allreduce(len(wrong)) else []
            if texts:
                raise topology.on_all_ranks(
                    ValueError(f"all_to_all: {'; '.join(filter(None, texts))}: split sizes must fit")
                )
            exchange(topology, sends, receives)
        write_bytes(outputs, receives)

    # --- messages and barriers -------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int = 0) -> InFlight:
        """Begin to send a tensor to a rank of the group."""
        (tensor,) = tensors
        return self._open().send(tensor, rank, tag)

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int = 0) -> InFlight:
        """Begin to receive a tensor from a rank of the group."""
        (tensor,) = tensors
        return self._open().receive(tensor, rank, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> InFlight:
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
        limit = None if timeout is None or timeout <= timedelta(0) else timeout.total_seconds()
        self.topology.limited(limit or self.topology.timeout_seconds).barrier()
