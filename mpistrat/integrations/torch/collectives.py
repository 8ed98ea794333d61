"""The collectives of a process group: torch's signatures, checks of arguments, and calls of this library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import (
    AllreduceOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from mpistrat.arrays import arrays
from mpistrat.collectives import CommunicationOptions, CrossDeviceOps, arena, reduce_scatter, structures
from mpistrat.collectives.movement import moves
from mpistrat.collectives.movement.moves import exchange
from mpistrat.collectives.operations import FurtherOp, Op
from mpistrat.integrations.torch.tensors import (
    BYTES_ONLY,
    also_of_one_tensor,
    collective,
    host_array,
    host_bytes,
    overlap,
    require,
    require_dense,
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
from mpistrat.values import ReduceOp

_OPS: dict[str, Op] = {
    "SUM": ReduceOp.SUM,
    "AVG": ReduceOp.MEAN,
    "PRODUCT": FurtherOp.PROD,
    "MIN": FurtherOp.MIN,
    "MAX": FurtherOp.MAX,
}
# Of bools: a sum or a maximum is "any", a product or a minimum is "all", as with NCCL.
_OF_BOOLS: dict[str, Op] = {
    "SUM": FurtherOp.MAX,
    "MAX": FurtherOp.MAX,
    "BOR": FurtherOp.MAX,
    "PRODUCT": FurtherOp.MIN,
    "MIN": FurtherOp.MIN,
    "BAND": FurtherOp.MIN,
}
_BITWISE: dict[str, np.ufunc] = {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}
# Up to this size a prepared reduction is kept for further calls, and its result is copied. A reduction of larger arrays
# writes to one of them, and is prepared for it alone.
_CACHED_BYTES = 1 << 20


def op_of(options: Any) -> Any:
    """Return the reduction of torch in the options of a call, or given in place of them; by default SUM."""
    return torch.distributed.ReduceOp.SUM if options is None else getattr(options, "reduceOp", options)


def is_integer_mean(op: Any, dtype: torch.dtype) -> bool:
    """Return whether a reduction is the mean of integers: their sum, divided and rounded towards 0, as NCCL does."""
    return _member(op).name == "AVG" and not (dtype.is_floating_point or dtype.is_complex)


def divided(total: np.ndarray, ranks: int) -> np.ndarray:
    """Return a sum divided by the number of ranks, integers rounded towards 0. May change ``total``."""
    if total.dtype.kind not in "iu":
        return np.asarray(total / ranks, total.dtype)
    # The sum fits: |total| is at most ranks times the largest.
    total += (total < 0) * np.array(ranks - 1, total.dtype)
    total //= ranks
    return total


def _member(op: Any) -> Any:
    # A ReduceOp has a member and an operand; the members themselves are of another class.
    return op.__getstate__()[0] if type(op) is torch.distributed.ReduceOp else op


def reduction(op: Any, dtype: torch.dtype) -> Op | np.ufunc:
    """Return the reduction of this library for one of torch, or the ufunc of a bitwise one.

    Raise NotImplementedError if the op has none, and TypeError if it is not defined for the dtype.
    """
    name = _member(op).name
    if name not in _OPS and name not in _BITWISE:
        raise NotImplementedError(
            f"{name} is not a reduction of mpistrat: {', '.join((*_OPS, *_BITWISE))}; scale the tensor and use SUM"
        )
    if dtype in BYTES_ONLY:
        raise TypeError(f"{name} of {dtype} is not defined: tensors of this dtype are moved only; cast to bfloat16")
    if dtype is torch.bool:
        if name not in _OF_BOOLS:
            raise TypeError(f"{name} of torch.bool is not defined: cast to an integer")
        return _OF_BOOLS[name]
    if (dtype.is_floating_point or dtype.is_complex) and name in _BITWISE:
        raise TypeError(f"{name} of {dtype} is not defined: bitwise reductions are for integers")
    return _BITWISE.get(name) or _OPS[name]


class GroupCollectives:
    """The collectives of a process group. All reductions are by the same ops and with the same options."""

    topology: Topology
    _ops: CrossDeviceOps
    _of_reductions: CommunicationOptions

    @also_of_one_tensor(AllreduceOptions, 0, "tensor", "op", "timeout")
    @collective
    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None, timeout: Any = None) -> Done:
        """Combine a tensor over all ranks, in place."""
        write_each(tensors, self._combined("all_reduce", list(tensors), op_of(opts), in_place=True))
        return Done(list(tensors))

    @collective
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Done:
        """Combine tensors over all ranks, in place, in as few messages as possible."""
        write_each(tensors, self._combined("all_reduce_coalesced", list(tensors), op_of(opts), in_place=True))
        return Done(list(tensors))

    @collective
    def average_buffer(self, buffer: np.ndarray) -> None:
        """Average an array in an arena over all ranks, in place."""
        self._ops.all_reduce(ReduceOp.MEAN, [buffer], self._of_reductions, "all_reduce")

    @also_of_one_tensor(ReduceOptions, 0, "tensor", "root", "op", "timeout")
    @collective
    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Done:
        """Combine a tensor over all ranks. Only the root's is written to."""
        root = root_of(opts)
        with structures.refusals("reduce", self.topology):
            require_rank("reduce", root, self.topology.size)
        totals = self._combined(f"reduce to rank {root}", list(tensors), op_of(opts))
        if self.topology.rank == root:
            write_each(tensors, totals)
        return Done(list(tensors))

    def _combined(self, name: str, tensors: list[Tensor], op: Any, in_place: bool = False) -> list[Any]:
        """Return the combinations of tensors over all ranks; with ``in_place`` perhaps in the memory of the tensors.

        They are tensors on a GPU if all ``tensors`` are there and CuPy reduces them, else arrays on the host. The host
        reduces bools, bits, means of integers, and bfloat16 with CuPy 13.
        """
        with structures.refusals(name, self.topology):
            dtypes = {tensor.dtype for tensor in tensors}
            if len(dtypes) > 1 and torch.bool in dtypes:
                raise TypeError(f"{name}: bools and numbers cannot be combined in one call")
            kinds = [reduction(op, tensor.dtype) for tensor in tensors]  # equal for all, or raises
            divides = any(is_integer_mean(op, dtype) for dtype in dtypes)
            own_op = kinds[0] if kinds and not divides else ReduceOp.SUM
            for tensor in tensors:
                require_dense(tensor)
            by_host = divides or isinstance(own_op, np.ufunc) or torch.bool in dtypes or not tensors
            on_gpu = not by_host and all(tensor.is_cuda for tensor in tensors) and _by_cupy(tensors)
            hosts = [] if on_gpu else [_countable(host_array(tensor)) for tensor in tensors]
        if on_gpu:
            assert not isinstance(own_op, np.ufunc)
            return self._ops.all_reduce(own_op, tensors, self._of_reductions, name)
        totals = self._on_host(name, hosts, own_op, in_place)
        return [divided(total, self.topology.size) for total in totals] if divides else totals

    def _on_host(self, name: str, hosts: list[np.ndarray], own: Op | np.ufunc, in_place: bool) -> list[np.ndarray]:
        if isinstance(own, np.ufunc):
            return [self._bitwise(own, host) for host in hosts]
        if len(hosts) == 1 and hosts[0].nbytes > _CACHED_BYTES and arena.arenas_of(self.topology, hosts) == [None]:
            total = self._large(own, hosts[0], name, in_place)
            if total is not None:
                return [total]
        return self._ops.all_reduce(own, hosts, self._of_reductions, name)

    def _large(self, own: Op, host: np.ndarray, name: str, in_place: bool) -> np.ndarray | None:
        """Combine an array in its own or in new memory; return None if this is not possible."""
        flat = host.reshape(-1)
        out = flat if in_place else np.empty_like(flat)
        key = ((flat.dtype, flat.shape),)
        prepared = self._ops.joined_all_reduce(own, key, out, self._of_reductions, (name, host.shape))
        if prepared is None:
            return None
        prepared.run([flat], self._of_reductions.timeout_seconds)
        return out.reshape(host.shape)

    def _bitwise(self, ufunc: np.ufunc, host: np.ndarray) -> np.ndarray:
        self.topology.lock.compare(operation("reduce", ufunc.__name__))  # the all-gather cannot compare the ufunc
        rows = moves.all_gather(self.topology, host.reshape(1, -1), 0)
        return ufunc.reduce(rows, axis=0).reshape(host.shape)

    @also_of_one_tensor(ReduceScatterOptions, 0, "output", "input", "op", "timeout")
    @collective
    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Done:
        """Combine a list of tensors, one for each rank, and return each to its rank."""
        for output, parts in zip(outputs, inputs, strict=True):
            self._scatter_parts(output, list(parts), op_of(opts))
        return Done(list(outputs))

    def _scatter_parts(self, output: Tensor, parts: list[Tensor], op: Any) -> None:
        with structures.refusals("reduce_scatter", self.topology):
            require_one_for_each_rank("reduce_scatter", "input", parts, self.topology.size)
            require(
                output.numel() == parts[self.topology.rank].numel(),
                f"reduce_scatter: the output has {output.numel()} elements, and input {self.topology.rank} "
                f"{parts[self.topology.rank].numel()}",
            )
            require_dtype("reduce_scatter", output, *parts)
            hosts = [host_array(part).reshape(-1) for part in parts]
        if len(set(map(len, hosts))) == 1:
            self._scattered(output, np.stack(hosts), op)
            return
        joined = torch.cat([part.detach().reshape(-1) for part in parts])
        (total,) = self._combined("reduce_scatter", [joined], op)
        start = sum(map(len, hosts[: self.topology.rank]))
        write(output, total[start : start + output.numel()])

    @collective
    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Done:
        """Combine a tensor, and return a part of it to each rank."""
        with structures.refusals("reduce_scatter", self.topology):
            require(
                output.numel() * self.topology.size == tensor.numel(),
                f"reduce_scatter: {tensor.numel()} elements do not make {self.topology.size} parts of {output.numel()}",
            )
            require_dtype("reduce_scatter", output, tensor)
            rows = host_array(tensor).reshape(self.topology.size, output.numel())
        self._scattered(output, rows, op_of(opts))
        return Done([output])

    @collective
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Done:
        """Combine and scatter several tensors, one after the other."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, tensor, opts)
        return Done(list(outputs))

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _scattered(self, output: Tensor, rows: np.ndarray, op: Any) -> None:
        """Combine ``rows``, one for each rank, and write this rank's row into ``output``."""
        with structures.refusals("reduce_scatter", self.topology):
            own_op, rows = reduction(op, output.dtype), _countable(rows)
            divides = is_integer_mean(op, output.dtype)
            own_op = ReduceOp.SUM if divides else own_op
        if isinstance(own_op, np.ufunc):
            total = self._bitwise(own_op, rows)[self.topology.rank]
        elif self._of_reductions.algorithm is not None:  # an algorithm that the user names serves all reductions
            (totals,) = self._ops.all_reduce(own_op, [rows], self._of_reductions, "reduce_scatter")
            total = totals[self.topology.rank]
        else:
            total = reduce_scatter.reduce_scatter(self.topology, own_op, rows)
        write(output, divided(total, self.topology.size) if divides else total)

    # --- moves -----------------------------------------------------------------------

    @also_of_one_tensor(BroadcastOptions, 0, "tensor", "root", "timeout")
    @collective
    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Done:
        """Copy the tensors of a rank to all ranks."""
        root = root_of(opts)
        with structures.refusals("broadcast", self.topology):
            require_rank("broadcast", root, self.topology.size)
            hosts = [host_array(tensor) for tensor in tensors]
        copies = moves.broadcast(self.topology, hosts, root=root)
        if self.topology.rank != root:
            write_each(tensors, copies)
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
        # Every rank gets the lengths that all others expect and send: all raise, or none.
        # Three axes: rows of int64 that a rank gathers have two, and would pass for lengths.
        own = np.array([[[*lengths, len(flat)]]], np.int64)
        announced = moves.all_gather(self.topology, own, 0)[:, 0]
        if (announced[:, :-1] != announced[:, -1]).any():
            raise ValueError(
                f"all_gather: the ranks send {announced[:, -1].tolist()} elements, and have outputs for "
                f"{announced[:, :-1].tolist()} (a list for each rank)"
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
            # Where memory is both sent and written to, a received message would change one that is still being sent.
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


def _by_cupy(tensors: Sequence[Tensor]) -> bool:
    """Return whether CuPy is there and reads tensors on a GPU: version 13 refuses bfloat16."""
    half = next((tensor for tensor in tensors if tensor.dtype is torch.bfloat16), None)
    try:
        return arrays.on_gpu(tensors[0]) and (half is None or arrays.to_cupy(half) is not None)
    except NotImplementedError:
        return False


def _countable(host: np.ndarray) -> np.ndarray:
    """Return bools as the integers that they are in memory."""
    return host.view(np.uint8) if host.dtype == np.bool_ else host
