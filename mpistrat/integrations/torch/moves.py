"""The moves of a process group: torch's signatures, what is checked, and which moves of this library serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import BroadcastOptions, GatherOptions, ScatterOptions

from mpistrat.collectives import structures
from mpistrat.collectives.movement import moves
from mpistrat.collectives.movement.moves import exchange
from mpistrat.integrations.torch.tensors import (
    also_of_one_tensor,
    collective,
    host_array,
    host_bytes,
    overlap,
    require,
    require_dtype,
    require_one_for_each_rank,
    require_rank,
    room,
    root_of,
    write,
    write_bytes,
    write_each,
)
from mpistrat.integrations.torch.work import Done
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.topology import Topology


class GroupMoves:
    """The moves of a process group. All are collective."""

    topology: Topology

    @also_of_one_tensor(BroadcastOptions, 0, "tensor", "root", "timeout")
    @collective
    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Done:
        """Copy the tensors of a rank to all ranks."""
        root = root_of(opts)
        with structures.refusals("broadcast", self.topology):
            require_rank("broadcast", root, self.topology.size)
            hosts = [host_array(tensor) for tensor in tensors]
        found = moves.broadcast(self.topology, hosts, root=root)
        if self.topology.rank != root:
            write_each(tensors, found)
        return Done(list(tensors))

    @collective
    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Done:
        """Gather a tensor of each rank, one behind the other in one tensor."""
        with structures.refusals("all_gather", self.topology):
            size, own = self.topology.size, tensor.numel()
            require(
                output.numel() == size * own,
                f"all_gather: the output has {output.numel()} elements, and {size} inputs of {own} have {size * own}",
            )
            require_dtype("all_gather", output, tensor)
            row = host_array(tensor).reshape(1, own)
        write(output, moves.all_gather(self.topology, row, 0))
        return Done([output])

    @collective
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Done:
        """Gather several tensors, one after the other."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, tensor)
        return Done(list(outputs))

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @also_of_one_tensor(AllgatherOptions, 1, "output_tensors", "input_tensor", "timeout")
    @collective
    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Done:
        """Gather a tensor of each rank, in a list. The tensors of different ranks may differ in size."""
        for parts, tensor in zip(outputs, inputs, strict=True):
            self._all_gather(list(parts), tensor)
        return Done([part for parts in outputs for part in parts])

    @collective
    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Done:
        """Gather several tensors; ``outputs[rank][i]`` takes the tensor ``i`` of a rank."""
        for i, tensor in enumerate(inputs):
            self._all_gather([parts[i] for parts in outputs], tensor)
        return Done([part for parts in outputs for part in parts])

    def _all_gather(self, outputs: list[Tensor], tensor: Tensor) -> None:
        with structures.refusals("all_gather", self.topology):
            require_one_for_each_rank("all_gather", "output", outputs, self.topology.size)
            require_dtype("all_gather", tensor, *outputs)
            flat = host_array(tensor).reshape(-1)
            lengths = [output.numel() for output in outputs]
        if set(lengths) == {len(flat)}:
            rows = moves.all_gather(self.topology, flat.reshape(1, -1), 0)
            write_each(outputs, list(rows))
            return
        # Every rank sees what all others expect and send: all raise, or none.
        # Three axes: rows of int64 that a rank gathers have two, and would pass for lengths.
        own = np.array([[[*lengths, len(flat)]]], np.int64)
        told = moves.all_gather(self.topology, own, 0)[:, 0]
        if (told[:, :-1] != told[:, -1]).any():
            raise ValueError(
                f"all_gather: the ranks send {told[:, -1].tolist()} elements, and have outputs for "
                f"{told[:, :-1].tolist()} (a list for each rank)"
            )
        joined = moves.all_gather(self.topology, flat, 0)
        write_each(outputs, np.split(joined, np.cumsum(lengths)[:-1]))

    @also_of_one_tensor(GatherOptions, 1, "output_tensors", "input_tensor", "root", "timeout")
    @collective
    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Done:
        """Gather a tensor of each rank in a list of one rank."""
        (tensor,) = inputs
        parts = list(outputs[0]) if outputs else []
        self._to_or_from_one("gather", parts, tensor, root_of(opts))
        return Done(parts)

    @also_of_one_tensor(ScatterOptions, 0, "output_tensor", "input_tensors", "root", "timeout")
    @collective
    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Done:
        """Send each rank a tensor of a list of one rank."""
        (tensor,) = outputs
        self._to_or_from_one("scatter", list(inputs[0]) if inputs else [], tensor, root_of(opts))
        return Done([tensor])

    def _to_or_from_one(self, name: str, parts: list[Tensor], tensor: Tensor, root: int) -> None:
        """Gather ``tensor`` of all ranks in ``parts`` of the root, or scatter these, as ``name`` says."""
        is_root, gathers = self.topology.rank == root, name == "gather"
        with structures.refusals(name, self.topology):
            require_rank(name, root, self.topology.size)
            if is_root:
                require_one_for_each_rank(name, "output" if gathers else "input", parts, self.topology.size)
                require_dtype(name, tensor, *parts)
                for part in parts:
                    require(
                        part.numel() == tensor.numel(),
                        f"{name}: a tensor of the list has {part.numel()} elements, and the other {tensor.numel()}",
                    )
            many: list[np.ndarray | None] = [None] * self.topology.size
            one: list[np.ndarray | None] = [None] * self.topology.size
            # Memory that is sent and written to: a message would change what another one still sends.
            apart = is_root and overlap(*((parts, [tensor]) if gathers else ([tensor], parts)))
            if gathers:
                one[root] = host_bytes(tensor)
                many = [room(part, apart) for part in parts] if is_root else many
            else:
                one[root] = room(tensor, apart)
                many = [host_bytes(part) for part in parts] if is_root else many
        with self.topology.lock.collective(operation(name, root, (str(tensor.dtype), tuple(tensor.shape)))):
            exchange(self.topology, *((one, many) if gathers else (many, one)))
        if gathers:
            write_bytes(parts, many, apart)
        else:
            write_bytes([tensor], [one[root]], apart)

    @collective
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
        self.alltoall(received, sent)
        return Done([output])

    alltoall_base = all_to_all_single

    def _cut(self, tensor: Tensor, sizes: Sequence[int] | None) -> list[Tensor]:
        """Return the rows for each rank."""
        ranks = self.topology.size
        if not sizes:
            require(
                tensor.dim() > 0 and len(tensor) % ranks == 0,
                f"all_to_all: {len(tensor) if tensor.dim() else 0} rows cannot be divided among {ranks} ranks: "
                "give split sizes",
            )
            sizes = [len(tensor) // ranks] * ranks
        require(
            len(sizes) == ranks and sum(sizes) == len(tensor),
            f"all_to_all: split sizes {list(sizes)} do not make {len(tensor)} rows for {ranks} ranks",
        )
        return list(torch.split(tensor.detach(), list(sizes)))

    @collective
    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Done:
        """Send tensor ``i`` of a list to rank ``i``."""
        with structures.refusals("all_to_all", self.topology):
            require_one_for_each_rank("all_to_all", "output", outputs, self.topology.size)
            require_one_for_each_rank("all_to_all", "input", inputs, self.topology.size)
            require_dtype("all_to_all", *outputs, *inputs)
            sends = [host_bytes(tensor) for tensor in inputs]
            apart = overlap(outputs, inputs)  # as in the call on one tensor in place
            receives = [room(tensor, apart) for tensor in outputs]
        expected = np.array(list(map(len, receives)), np.int64)
        announced = np.empty_like(expected)
        topology, world = self.topology, self.topology.world
        with topology.lock.collective(operation("all_to_all", str(inputs[0].dtype))):
            world.Alltoall(np.array(list(map(len, sends)), np.int64), announced)
            wrong = np.flatnonzero(announced != expected)
            text = ""
            if len(wrong):
                other = int(wrong[0])
                text = (
                    f"rank {topology.rank} expects {expected[other]} bytes of rank {other}; it sends {announced[other]}"
                )
            texts = world.allgather(text) if world.allreduce(len(wrong)) else []
            if texts:
                raise topology.lock.on_all_ranks(
                    ValueError(f"all_to_all: {'; '.join(filter(None, texts))}: split sizes must fit")
                )
            exchange(topology, sends, receives)
        write_bytes(outputs, receives, apart)
        return Done(list(outputs))
