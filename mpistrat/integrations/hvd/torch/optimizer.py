"""The optimizer that combines the gradients of all ranks before it changes the weights."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from mpistrat.integrations.hvd import job, reductions
from mpistrat.integrations.hvd.job import ProcessSet
from mpistrat.integrations.hvd.reductions import Adasum, Average, Min, Op, Product
from mpistrat.integrations.hvd.torch.gradients import Compression, Compressor, abbreviated, sparse_allreduce_async


class BackwardPasses:
    """The number of backward passes since the last step for each parameter, counted by hooks.

    ``per_step`` is the largest number that is allowed before a step.
    """

    def __init__(self, parameters: Iterable[Tensor], per_step: int):
        self.per_step = per_step
        self._counts: dict[Tensor, int] = {}
        for p in parameters:
            p.register_post_accumulate_grad_hook(self._count)

    def _count(self, p: Tensor) -> None:
        self._counts[p] = count = self._counts.get(p, 0) + 1
        if count > self.per_step:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                f"backward_passes_per_step (now {self.per_step}) to accumulate gradients locally."
            )

    def has_computed(self, p: Tensor) -> bool:
        """Return whether a backward pass has computed the gradient of a parameter since the last step."""
        return p in self._counts

    def clear(self) -> None:
        """Begin a step."""
        self._counts.clear()


def grouped(parameters: list[Tensor], groups: int | Sequence[Sequence[Tensor]] | None) -> list[list[Tensor]]:
    """Return parameters in groups, in an order that is equal on all ranks.

    ``groups`` is the number of groups, or the groups; a parameter in none of them is a group of its own. By default
    there is one group. Raise ValueError if a parameter is in two groups.
    """
    if not groups:
        return [parameters] if parameters else []
    if isinstance(groups, int):
        ends = [len(parameters) * i // groups for i in range(groups + 1)]
        blocks = [parameters[first:last] for first, last in itertools.pairwise(ends)]
        return [block for block in blocks if block]
    group_of: dict[Tensor, int] = {}
    for number, group in enumerate(groups):
        for p in group:
            if not isinstance(p, Tensor):
                raise ValueError("groups must consist of torch.Tensor.")
            if p in group_of:
                raise ValueError("A parameter can only appear once in groups.")
            group_of[p] = number
    lists: list[list[Tensor]] = [[] for _ in groups]
    alone = []
    for p in parameters:
        if p in group_of:
            lists[group_of[p]].append(p)
        else:
            alone.append([p])
    return [members for members in lists if members] + alone


def names_of(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """Return the names of the parameters of an optimizer that need gradients.

    Raise ValueError if names are not unique, or miss a parameter.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is None:
        return {p: f"allreduce.noname.{i}" for i, p in enumerate(parameters) if p.requires_grad}
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    named = {p: name for name, p in pairs}
    missing = [tuple(p.shape) for p in parameters if p not in named]
    if missing:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: those of shapes "
            f"{missing}"
        )
    return {p: named[p] for p in parameters if p.requires_grad}


class _Distributed:
    """The methods that are added to an optimizer."""

    param_groups: list[dict[str, Any]]
    _parameter_names: dict[Tensor, str]
    _passes: BackwardPasses
    _placeholders: dict[Tensor, Tensor]  # gradients of zeros that no backward pass has computed
    _compression: type[Compressor]
    _op: Op
    _predivide: float
    _groups: int | Sequence[Sequence[Tensor]] | None
    _sparse_as_dense: bool
    _process_set: ProcessSet
    _synchronized = False
    _should_synchronize = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes whose gradients are added before a step."""
        self._passes.per_step = passes

    def _updated(self) -> list[Tensor]:
        """Return the parameters with gradients, in the order that is equal on all ranks."""
        named, parameters = self._parameter_names, [p for group in self.param_groups for p in group["params"]]
        for p in parameters:
            if p.requires_grad and p not in named:  # of a group that was added
                named[p] = f"allreduce.noname.{len(named)}"
        return [p for p in parameters if p in named]

    def _drop_placeholders(self) -> None:
        """Set the zero gradients of the start to None, unless the program has written to them."""
        for p, zeros in self._placeholders.items():
            if p.grad is zeros and not self._passes.has_computed(p) and not zeros.any():
                p.grad = None
        self._placeholders.clear()

    def synchronize(self) -> None:
        """Combine the gradients of all ranks. `step` does it, unless it is in `skip_synchronize`. Collective."""
        self._synchronized = True
        self._drop_placeholders()
        self._passes.clear()
        if not self._process_set.included() or self._process_set.topology.size == 1:
            return
        were_sparse: dict[Tensor, int] = {}  # the number of sparse axes of gradients that are sent dense
        dense: dict[Tensor, Tensor] = {}
        without: set[Tensor] = set()
        for p in self._updated():
            gradient = p.grad
            if gradient is None:
                without.add(p)
                gradient = torch.zeros_like(p)  # another rank may have computed it
            if not gradient.is_sparse:
                dense[p] = p.grad = gradient
            elif self._sparse_as_dense:
                were_sparse[p] = gradient.sparse_dim()
                dense[p] = p.grad = gradient.to_dense()
            else:
                name = self._parameter_names[p]
                p.grad = sparse_allreduce_async(gradient, name, self._op, self._process_set)()
        for group in grouped([*dense], self._groups):
            self._reduce(group, [dense[p] for p in group], without)
        for p, axes in were_sparse.items():  # an optimizer such as SparseAdam takes no others
            p.grad = dense[p].to_sparse(axes)

    def _reduce(self, parameters: list[Tensor], gradients: list[Tensor], without: set[Tensor]) -> None:
        """Combine gradients. A parameter that is in ``without`` on all ranks gets None, as in one process."""
        pairs = [self._compression.compress(tensor) for tensor in gradients]
        # One more array in the same message, and of its dtype. Zeros would let momentum and weight decay change
        # a frozen parameter: pytorch issue 28294.
        have, lack = {Min: (-1, 0), Product: (0, 1)}.get(self._op, (1, 0))
        flags = torch.tensor([lack if p in without else have for p in parameters], dtype=pairs[0][0].dtype)
        name = "gradients of " + abbreviated([self._parameter_names[p] for p in parameters])
        totals = reductions.grouped_allreduce(
            [*(sent for sent, _ in pairs), flags],
            name=name,
            op=self._op,
            prescale_factor=1 / self._predivide,
            postscale_factor=self._predivide,
            process_set=self._process_set,
        )
        exist = (totals.pop() != lack).tolist()
        for p, exists, gradient, total, (_, ctx) in zip(parameters, exist, gradients, totals, pairs, strict=True):
            if exists:
                gradient.copy_(self._compression.decompress(total, ctx))
            else:
                p.grad = None

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context in which `step` does not combine gradients, since `synchronize` has done so."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Combine the gradients of all ranks and change the weights. Collective.

        Raise NotImplementedError with a closure on several ranks: its gradients would not be combined.
        """
        refuse_closure(closure, self._process_set)
        self._drop_placeholders()
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): gradients are combined twice",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step(closure)  # type: ignore[misc]  # of the optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self._drop_placeholders()
        self._passes.clear()
        super().zero_grad(set_to_none)  # type: ignore[misc]  # of the optimizer

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the optimizer."""
        self._passes.clear()
        self._synchronized = False
        super().load_state_dict(state_dict)  # type: ignore[misc]  # of the optimizer


class _DistributedAdasum(_Distributed):
    """Each rank makes a step of its own, and Adasum combines the changes of the weights."""

    def synchronize(self) -> None:
        """Do nothing: `step` combines."""

    def skip_synchronize(self) -> NoReturn:
        """Raise AssertionError: every step is combined."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step, and combine the steps of all ranks. Collective."""
        refuse_closure(closure, self._process_set)
        self._drop_placeholders()
        self._passes.clear()
        parameters = self._updated()
        starts = [p.detach().clone() for p in parameters]
        super(_Distributed, self).step(closure)  # type: ignore[misc]  # of the optimizer
        with torch.no_grad():
            pairs = [
                self._compression.compress(p.detach() - start) for p, start in zip(parameters, starts, strict=True)
            ]
            name = "steps of " + abbreviated([self._parameter_names[p] for p in parameters])
            totals = reductions.grouped_allreduce([sent for sent, _ in pairs], name=name, op=Adasum)
            for p, start, total, (_, ctx) in zip(parameters, starts, totals, pairs, strict=True):
                p.copy_(start + self._compression.decompress(total, ctx))


def refuse_closure(closure: Callable[[], Any] | None, process_set: ProcessSet) -> None:
    """Raise NotImplementedError if a step on several ranks has a closure."""
    if closure is not None and process_set.included() and process_set.topology.size > 1:
        raise NotImplementedError(
            "step(closure) on several ranks: the gradients of the closure would not be combined; call it, then step()"
        )


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = job.global_process_set,
) -> Any:
    """Return an optimizer that combines the gradients of all ranks before each step.

    Its class is derived from the class of ``optimizer``, and it shares parameters and state. All gradients of a step
    are combined by one call in `step`, in the order of the parameters: the order in which they were computed does not
    matter. A gradient that some ranks lack counts as zeros there; one that all ranks lack stays None, so that frozen
    and unused parameters do not change.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
    named_parameters : iterable of (str, Tensor), optional
        ``model.named_parameters()``. The ranks compare the names.
    compression : type of Compressor
        The dtype that is sent.
    backward_passes_per_step : int
        How many backward passes add to the gradients before each step.
    op : Op
        Average, Sum, Min, Max, Product, or Adasum, which combines the steps of the ranks instead of gradients.
    gradient_predivide_factor : float
        Gradients are divided by it before they are added, and multiplied after it.
    num_groups, groups : int or list of lists of Tensor, optional
        How many messages, or which parameters go together; by default all. The first is the former name.
    sparse_as_dense : bool
        Whether sparse gradients are sent as dense ones. The optimizer gets sparse ones again.
    process_set : ProcessSet

    Returns
    -------
    torch.optim.Optimizer
        With `synchronize`, `skip_synchronize` and `set_backward_passes_per_step`.

    Raises
    ------
    ValueError
        If an argument is wrong, or names are missing or not unique.

    Examples
    --------
    >>> import torch, mpistrat.integrations.hvd.torch as hvd
    >>> hvd.init()
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    >>> model(torch.ones(3, 2)).sum().backward()
    >>> optimizer.step()
    """
    if not isinstance(op, Op):
        raise ValueError(f"op must be one of the reductions of this module, not {op!r}")
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if op is Adasum and process_set is not job.global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets: use op=Average")
    several = job.size() > 1
    kind = _DistributedAdasum if op is Adasum and several else _Distributed
    distributed: Any = object.__new__(type(type(optimizer).__name__, (kind, type(optimizer)), {}))
    # Without `step`: a scheduler of learning rates replaces it on the object, and would call the old class's step.
    distributed.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    distributed._parameter_names = names_of(optimizer, named_parameters)
    distributed._compression, distributed._op, distributed._predivide = compression, op, gradient_predivide_factor
    distributed._groups = (num_groups or None) if groups is None else groups
    distributed._sparse_as_dense, distributed._process_set = sparse_as_dense, process_set
    combined = [*distributed._parameter_names] if several and process_set.included() else []
    distributed._passes = BackwardPasses(combined, backward_passes_per_step)
    distributed._placeholders = {}
    for p in combined:  # as in Horovod: programs read gradients before the first backward pass
        if p.grad is None:
            distributed._placeholders[p] = p.grad = torch.zeros_like(p)
    return distributed
