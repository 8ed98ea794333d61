"""The strategy "mpistrat" of Lightning's Trainer: `DDPStrategy` with the ranks of MPI and the backend "mpistrat".

Importing this module registers the name, so that ``Trainer(strategy="mpistrat")`` finds it.

Examples
--------
>>> import mpistrat.integrations.lightning  # doctest: +SKIP
>>> trainer = Trainer(accelerator="cpu", devices=4, strategy="mpistrat")  # doctest: +SKIP
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

try:
    from lightning.fabric.plugins.environments import ClusterEnvironment
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
except ImportError as error:
    raise ImportError("mpistrat.integrations.lightning needs Lightning: pip install lightning") from error

from mpistrat.integrations.torch import BACKEND
from mpistrat.process import mpi
from mpistrat.runtime.topology import Topology

__all__ = ["MpiEnvironment", "MpistratStrategy"]

_MEANS = ("mean", "avg", dist.ReduceOp.AVG)


class MpiEnvironment(ClusterEnvironment):
    """The ranks of the job as MPI knows them. No rank needs an address or a port.

    Examples
    --------
    >>> from mpistrat.integrations.lightning import MpiEnvironment  # doctest: +SKIP
    >>> MpiEnvironment().world_size()  # doctest: +SKIP
    1
    """

    main_address = "localhost"  # Lightning asks for an address, which the backend does not use
    main_port = 0
    creates_processes_externally = True

    def __init__(self) -> None:
        super().__init__()
        self._topology = Topology.of(mpi.start().COMM_WORLD)

    @staticmethod
    def detect() -> bool:
        """Return whether other ranks run the same program."""
        return mpi.among_several()

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._topology.size

    def global_rank(self) -> int:
        """Return the number of this rank."""
        return self._topology.rank

    def local_rank(self) -> int:
        """Return the number of this rank on its node."""
        return int(self._topology.node.rank)

    def node_rank(self) -> int:
        """Return the number of this rank's node."""
        return next(i for i, ranks in enumerate(self._topology.nodes) if self._topology.rank in ranks)

    def set_world_size(self, size: int) -> None:
        """Ignore the number that Lightning computes: MPI's is fixed."""

    def set_global_rank(self, rank: int) -> None:
        """Ignore the number that Lightning computes: MPI's is fixed."""

    def require(self, devices: int, num_nodes: int) -> None:
        """Raise ValueError, which says what to give, unless the Trainer has the job's numbers of ranks and nodes."""
        counts = {len(ranks) for ranks in self._topology.nodes}
        nodes = len(self._topology.nodes)
        if counts == {devices} and nodes == num_nodes:
            return
        if len(counts) > 1:
            raise ValueError(f"Lightning needs equal numbers of ranks on all nodes, not {sorted(counts)}")
        raise ValueError(
            f"the job has {counts.pop()} rank(s) on each of {nodes} node(s), and the Trainer was told {devices} on "
            f"{num_nodes}: give it devices={len(self._topology.nodes[0])}, num_nodes={nodes}"
        )


class MpistratStrategy(DDPStrategy):
    """Lightning's `DDPStrategy` over MPI.

    Parameters
    ----------
    timeout : datetime.timedelta
        The time limit of each collective.
    **options : object
        As for `DDPStrategy`, such as ``find_unused_parameters``. The cluster environment and the backend are given.

    Raises
    ------
    ValueError
        If ``devices`` and ``num_nodes`` of the Trainer are not the job's.

    Examples
    --------
    >>> from mpistrat.integrations.lightning import MpistratStrategy  # doctest: +SKIP
    >>> trainer = Trainer(accelerator="cpu", devices=4, strategy=MpistratStrategy())  # doctest: +SKIP
    """

    def __init__(self, timeout: timedelta = default_pg_timeout, **options: Any):
        self._ranks, self._limit = MpiEnvironment(), timeout
        super().__init__(cluster_environment=self._ranks, process_group_backend=BACKEND, timeout=timeout, **options)

    def setup_distributed(self) -> None:
        """Create the process group. Collective over all ranks."""
        self._ranks.require(self.num_processes, self.num_nodes)
        if not dist.is_initialized():  # Lightning would open a port
            dist.init_process_group(BACKEND, timeout=self._limit)
        super().setup_distributed()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the combination of a tensor over the ranks.

        The mean of integers is a float. Lightning averages the lengths of batches in this way.
        """
        if isinstance(tensor, torch.Tensor) and not tensor.is_floating_point() and reduce_op in _MEANS:
            tensor = tensor.to(torch.get_default_dtype())
        return super().reduce(tensor, group, reduce_op)


StrategyRegistry.register(BACKEND, MpistratStrategy, description="DDP over MPI")
