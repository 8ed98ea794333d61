"""Broadcasts of weights and of the state of optimizers, so that all ranks begin alike."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from mpistrat import nest
from mpistrat.integrations.hvd import job, moves
from mpistrat.integrations.hvd.handles import copy_into, refusals
from mpistrat.integrations.hvd.job import example


class _Described:
    """The dtype and shape of a tensor, in its place."""

    def __init__(self, tensor: torch.Tensor):
        self.dtype, self.shape, self.on_host = tensor.dtype, tuple(tensor.shape), tensor.device.type == "cpu"


@example("hvd.broadcast_parameters(torch.nn.Linear(2, 1).state_dict(), root_rank=0)")
def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite tensors with those of one rank. Collective.

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
    """Return names as one text that is short and differs if the names differ.

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
    pairs = [each if isinstance(each, tuple) else (str(i), each) for i, each in enumerate(params)]
    for name, each in pairs:
        if not isinstance(each, torch.Tensor):
            raise ValueError(f"{name!r} of params is not a tensor but {each!r}: use broadcast_object")
    return [str(name) for name, _ in pairs], [each for _, each in pairs]


def _broadcast(tensors: list[torch.Tensor], root_rank: int, name: str) -> None:
    hosts = moves.broadcast_to_hosts(tensors, root_rank, name, job.global_process_set, "broadcast_parameters")
    if job.rank() != root_rank:
        for tensor, host in zip(tensors, hosts, strict=True):
            copy_into(tensor, host)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Give an optimizer the state and options of that of one rank. Collective.

    Nothing is changed on ``root_rank``, and no step is made. Other ranks need no state of their own. They get that of
    the root bit by bit, in its dtypes.

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
    skeleton = rebuild([_Described(leaf) if torch.is_tensor(leaf) else leaf for leaf in own])
    skeleton = moves.broadcast_object(skeleton if is_root else None, root_rank)
    leaves, rebuild = nest.flatten(skeleton)
    if is_root:
        state = [leaf for leaf in own if torch.is_tensor(leaf)]
    else:
        state = [torch.empty(leaf.shape, dtype=leaf.dtype) for leaf in leaves if isinstance(leaf, _Described)]
    _broadcast(state, root_rank, "the state of an optimizer")
    if not is_root:
        tensors = iter(state)
        given = rebuild([next(tensors) if isinstance(leaf, _Described) else leaf for leaf in leaves])
        # Without the state: load_state_dict casts it to the dtypes of the parameters, and makes sequences anew.
        optimizer.load_state_dict({**given, "state": {}})
        parameters = dict(zip(_parameters_of(given), _parameters_of(vars(optimizer)), strict=True))
        for key, values in given["state"].items():
            parameter = parameters.get(key, key)
            leaves, rebuild = nest.flatten(values)
            likes = nest.flatten(skeleton["state"][key])[0]
            placed = [
                leaf.to(getattr(parameter, "device", "cpu"))
                if isinstance(like, _Described) and not like.on_host
                else leaf
                for leaf, like in zip(leaves, likes, strict=True)
            ]
            optimizer.state[parameter] = rebuild(placed)


def _parameters_of(state: Mapping[str, Any]) -> list[Any]:
    return [each for group in state["param_groups"] for each in group["params"]]
