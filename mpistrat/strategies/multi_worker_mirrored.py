"""All ranks, wherever they are."""

from __future__ import annotations

from typing import Any, NoReturn

from mpistrat.collectives import CommunicationOptions
from mpistrat.runtime import mpi
from mpistrat.runtime.topology import Topology
from mpistrat.strategy import Strategy, StrategyExtended


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous data parallelism over all ranks of the job, variables mirrored.

    Parameters
    ----------
    cluster_resolver : ClusterResolver, optional
        Who the peers are, as the environment says it. MPI decides.
    communication_options : CommunicationOptions, optional
        Options of all its collectives.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks to use; by default all.

    Raises
    ------
    ValueError
        If ``communication_options`` are none.
    RuntimeError
        If this process is alone although its launcher started several tasks.

    Examples
    --------
    >>> strategy = MultiWorkerMirroredStrategy()
    >>> with strategy.scope():
    ...     pass  # create variables here
    >>> strategy.num_replicas_in_sync
    1
    """

    def __init__(
        self,
        cluster_resolver: Any = None,
        communication_options: CommunicationOptions | None = None,
        *,
        comm: Any = None,
    ):
        if communication_options is not None and not isinstance(communication_options, CommunicationOptions):
            raise ValueError(
                f"communication_options must be CommunicationOptions, not {communication_options!r}"
            )
        topology = Topology.of(mpi.start().COMM_WORLD if comm is None else comm)
        super().__init__(StrategyExtended(self, topology, communication_options=communication_options))
        self._resolver = cluster_resolver

    @property
    def cluster_resolver(self) -> Any:
        """The resolver that the strategy was given, or None."""
        return self._resolver

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise ValueError("MultiWorkerMirroredStrategy cannot be copied: create another on the same ranks")
