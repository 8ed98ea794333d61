"""Collectives of tensors through which gradients flow back, by Horovod's rules, and broadcasts of initial weights."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpistrat import nest
from mpistrat.integrations.hvd import job, moves, reductions
from mpistrat.integrations.hvd.handles import copy_into, one_by_one, refusals
from mpistrat.integrations.hvd.job import ProcessSet, example
from mpistrat.integrations.hvd.reductions import Average, Op, Sum, op_of

_all = job.global_process_set
Tensors = Sequence[Tensor]


class Compressor:
    """A way to make tensors smaller before they are sent: here, none. Subclass it for another.

    Examples
    --------
    >>> import torch
    >>> Compressor.compress(torch.ones(2))
    (tensor([1., 1.]), None)
    """

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return what is sent, and what `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the result for what came."""
        return tensor


class _Float16(Compressor):
    """Floating point tensors are sent as float16, and added in float32."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx)


class Compression:
    """The ways to make tensors smaller before they are sent.

    Attributes
    ----------
    none : type of Compressor
        Tensors are sent as they are.
    fp16 : type of Compressor
        Floating point tensors are sent as float16, and added in float32.

    Examples
    --------
    >>> import torch
    >>> sent, dtype = Compression.fp16.compress(torch.ones(2))
    >>> sent.dtype, Compression.fp16.decompress(sent, dtype).dtype
    (torch.float16, torch.float32)
    """

    none: type[Compressor] = Compressor
    fp16: type[Compressor] = _Float16


class _Collective(torch.autograd.Function):
    """A collective, and another one for the gradients of its results."""

    @staticmethod
    def forward(ctx: Any, make: Callable[..., Any], back: Callable[..., Any], *tensors: Tensor) -> Any:
        ctx.back = back
        return tuple(make([tensor.detach() for tensor in tensors]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None, None, *ctx.back([gradient.contiguous() for gradient in gradients]))


def _require_tensors(name: str, values: Sequence[Any], process_set: ProcessSet) -> None:
    """Raise on all ranks unless values are tensors."""
    with refusals(name, process_set):
        for value in values:
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"{name} of mpistrat.integrations.hvd.torch takes tensors of torch, not {type(value).__name__}: "
                    "mpistrat.integrations.hvd has it for other arrays"
                )


@example("hvd.allreduce(torch.ones(2))", "tensor([1., 1.])")
def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _all,
) -> Tensor:
    """Return the combination of the tensors of all ranks. Collective.

    Arguments are as for `mpistrat.integrations.hvd.allreduce`; ``compression`` is the dtype that is sent. The gradient
    is combined in the same way.
    """
    op = op_of(op, average)
    return grouped_allreduce([tensor], None, name, compression, op, prescale_factor, postscale_factor, process_set)[0]


@example("hvd.grouped_allreduce([torch.ones(2), torch.zeros(1)])", "[tensor([1., 1.]), tensor([0.])]")
def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _all,
) -> list[Tensor]:
    """Return the combinations of several tensors, in as few messages as possible. Collective."""
    op, tensors = op_of(op, average), list(tensors)
    _require_tensors("allreduce", tensors, process_set)
    pairs = [compression.compress(tensor) for tensor in tensors]
    combined = partial(
        reductions.grouped_allreduce,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )
    # The name is compared in the forward pass only: a backward pass has none.
    totals = _Collective.apply(partial(combined, name=name), combined, *[sent for sent, _ in pairs])
    return [compression.decompress(total, ctx) for total, (_, ctx) in zip(totals, pairs, strict=True)]


@example("len(hvd.allgather(torch.ones(2, 3))) == 2 * hvd.size()", "True")
def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = _all) -> Tensor:
    """Return the rows of the tensors of all ranks, in the order of ranks. Collective.

    The gradient is the average of the ranks' gradients.
    """
    _require_tensors("allgather", [tensor], process_set)

    def back(gradients: Tensors) -> Tensors:
        (mean,) = reductions.grouped_allreduce(gradients, None, None, Average, process_set=process_set)
        # Here, not in the forward pass: there it would depend on whether this rank's tensor requires a gradient.
        lengths = moves.allgather_object(len(tensor), None, process_set)
        return [torch.split(mean, lengths)[process_set.topology.rank]]

    return _Collective.apply(lambda own: [moves.allgather(own[0], name, process_set)], back, tensor)[0]


@example("hvd.broadcast(torch.tensor(5), root_rank=0)", "tensor(5)")
def broadcast(tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = _all) -> Tensor:
    """Return the tensor of one rank on every rank. Collective.

    The gradient of that rank is the average of the ranks' gradients; other ranks have a zero gradient.
    """
    _require_tensors("broadcast", [tensor], process_set)

    def back(gradients: Tensors) -> Tensors:
        (mean,) = reductions.grouped_allreduce(gradients, None, None, Average, process_set=process_set)
        return [mean if job.rank() == root_rank else torch.zeros_like(mean)]

    return _Collective.apply(lambda own: [moves.broadcast(own[0], root_rank, name, process_set)], back, tensor)[0]


@example("len(hvd.alltoall(torch.ones(hvd.size()))) == hvd.size()", "True")
def alltoall(tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = _all) -> Any:
    """Send consecutive rows to rank 0, 1, and so on, and return the rows that came. Collective.

    With ``splits`` also return how many rows came from each rank. The gradient goes back the same way.
    """
    _require_tensors("alltoall", [tensor], process_set)
    size, sent, received = process_set.topology.size, splits, torch.tensor([])
    if splits is None and tensor.dim() and len(tensor) % size == 0:
        sent = torch.full((size,), len(tensor) // size)

    def make(values: Tensors) -> list[Tensor]:
        nonlocal received
        output = moves.alltoall(values[0], sent, name, process_set)
        if sent is None:
            return [output]
        received = torch.as_tensor(output[1])  # other ranks may have other numbers of rows
        return [output[0]]

    (result,) = _Collective.apply(
        make, lambda gradients: [moves.alltoall(gradients[0], received, None, process_set)[0]], tensor
    )
    return result if splits is None else (result, received)


@example("len(hvd.reducescatter(torch.ones(hvd.size())))", "1")
def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Average,
    process_set: ProcessSet = _all,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Return this rank's rows of the combination of the tensors of all ranks. Collective.

    Of ``n`` rows every rank gets ``n // size``, and the first ``n % size`` ranks get one more. The gradients are
    gathered.
    """
    _require_tensors("reducescatter", [tensor], process_set)
    sent, ctx = compression.compress(tensor)

    def make(values: Tensors) -> list[Tensor]:
        return [reductions.reducescatter(values[0], name, op, process_set, prescale_factor, postscale_factor)]

    def back(gradients: Tensors) -> Tensors:
        factor = prescale_factor * postscale_factor * (process_set.topology.size if op is Sum else 1)
        return [moves.allgather(gradients[0] * factor, None, process_set)]

    return compression.decompress(_Collective.apply(make, back, sent)[0], ctx)


grouped_allgather, grouped_reducescatter = one_by_one(allgather), one_by_one(reducescatter)


@example(
    'hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), "rows", hvd.Average)().to_dense()[1]  # doctest: +SKIP',
    "tensor([0., 1.])",
)
def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: Op, process_set: ProcessSet = _all
) -> Callable[[], Tensor]:
    """Return a function that returns the sum or average of the sparse tensors of all ranks. Collective."""
    if op not in (Average, Sum):
        raise ValueError(f"sparse tensors are combined by Sum or Average, not {op.name}: make them dense")
    own = tensor.detach().coalesce()
    indices = moves.allgather(own.indices().t().contiguous(), name, process_set)
    values = moves.allgather(own.values(), name, process_set)
    if op is Average:
        values = values / process_set.topology.size
    total = torch.sparse_coo_tensor(indices.t(), values, tensor.size(), check_invariants=True)
    return lambda: total


class _TensorLike:
    """The dtype, shape and device of a tensor, which stands for it in a structure that is pickled."""

    def __init__(self, tensor: torch.Tensor):
        self.dtype, self.shape, self.on_host = tensor.dtype, tuple(tensor.shape), tensor.device.type == "cpu"


@example("hvd.broadcast_parameters(torch.nn.Linear(2, 1).state_dict(), root_rank=0)")
def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite tensors with the values of one rank. Collective.

    Parameters
    ----------
    params : dict, or iterable of tensors or of (name, tensor)
        For example ``model.state_dict()`` or ``model.named_parameters()``. The ranks compare the names.
    root_rank : int

    Raises
    ------
    ValueError
        If ``params`` is something else.
    MismatchError
        On every rank, if names, shapes or dtypes differ between ranks.
    """
    with refusals("broadcast_parameters", job.global_process_set):
        names, tensors = _named(params)
    _broadcast(tensors, root_rank, abbreviated(names))


def abbreviated(names: list[str]) -> str:
    """Return a short text for names, which differs if the names differ.

    >>> abbreviated(["a", "b"]), abbreviated([f"layer{i}" for i in range(9)])
    ('a, b', 'layer0, ..., layer8 (9 names, checksum 46d44bda)')
    """
    if len(names) <= 3:
        return ", ".join(names)
    checksum = zlib.crc32("\n".join(names).encode())
    return f"{names[0]}, ..., {names[-1]} ({len(names)} names, checksum {checksum:08x})"


def _named(params: Any) -> tuple[list[str], list[torch.Tensor]]:
    if isinstance(params, Mapping):
        params = sorted(params.items())
    elif not isinstance(params, Iterable) or isinstance(params, torch.Tensor):
        raise ValueError(f"params must be a dict or a list of tensors, not {type(params).__name__}")
    pairs = [item if isinstance(item, tuple) else (str(i), item) for i, item in enumerate(params)]
    for name, tensor in pairs:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name!r} of params is not a tensor but {tensor!r}: use broadcast_object")
    return [str(name) for name, _ in pairs], [tensor for _, tensor in pairs]


def _broadcast(tensors: list[torch.Tensor], root_rank: int, name: str) -> None:
    hosts = moves.broadcast_to_hosts(tensors, root_rank, name, job.global_process_set, "broadcast_parameters")
    if job.rank() != root_rank:
        for tensor, host in zip(tensors, hosts, strict=True):
            copy_into(tensor, host)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Overwrite the state and options of an optimizer with those of one rank. Collective.

    Nothing is changed on ``root_rank``, and no step is made. Other ranks need no state of their own. They get the
    root's state bit by bit, in its dtypes.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Also one of `DistributedOptimizer`.
    root_rank : int
    model : torch.nn.Module, optional
        Not used.

    Raises
    ------
    ValueError
        For ``torch.optim.LBFGS``.

    Examples
    --------
    >>> import torch, mpistrat.integrations.hvd.torch as hvd
    >>> hvd.init()
    >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1 * (hvd.rank() + 1))
    >>> hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    >>> optimizer.param_groups[0]["lr"]
    0.1
    """
    with refusals("broadcast_optimizer_state", job.global_process_set):
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("cannot broadcast torch.optim.LBFGS state: use broadcast_object(state_dict())")
    own, rebuild = nest.flatten(optimizer.state_dict())
    is_root = job.rank() == root_rank
    skeleton = rebuild([_TensorLike(leaf) if torch.is_tensor(leaf) else leaf for leaf in own])
    skeleton = moves.broadcast_object(skeleton if is_root else None, root_rank)
    leaves, rebuild = nest.flatten(skeleton)
    if is_root:
        state = [leaf for leaf in own if torch.is_tensor(leaf)]
    else:
        # On the host, whatever the root's device: the bytes arrive there.
        state = [torch.empty(leaf.shape, dtype=leaf.dtype) for leaf in leaves if isinstance(leaf, _TensorLike)]
    _broadcast(state, root_rank, "the state of an optimizer")
    if not is_root:
        tensors = iter(state)
        state_dict = rebuild([next(tensors) if isinstance(leaf, _TensorLike) else leaf for leaf in leaves])
        # Without the state: load_state_dict casts it to the dtypes of the parameters, and makes sequences anew.
        optimizer.load_state_dict({**state_dict, "state": {}})
        parameters = dict(zip(_parameters_of(state_dict), _parameters_of(vars(optimizer)), strict=True))
        for key, values in state_dict["state"].items():
            parameter = parameters.get(key, key)
            leaves, rebuild = nest.flatten(values)
            likes = nest.flatten(skeleton["state"][key])[0]
            placed = [
                leaf.to(getattr(parameter, "device", "cpu"))
                if isinstance(like, _TensorLike) and not like.on_host
                else leaf
                for leaf, like in zip(leaves, likes, strict=True)
            ]
            optimizer.state[parameter] = rebuild(placed)


def _parameters_of(state: Mapping[str, Any]) -> list[Any]:
    return [parameter for group in state["param_groups"] for parameter in group["params"]]
