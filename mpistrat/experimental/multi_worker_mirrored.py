"""MultiWorkerMirroredStrategy under its former name."""

from __future__ import annotations

import warnings
from typing import Any

from mpistrat import strategies
from mpistrat.collectives import CommunicationImplementation, CommunicationOptions


class _AlsoByNewName(type):
    """A metaclass: ``isinstance`` is true for every multi-worker strategy, created by either name."""

    def __instancecheck__(cls, instance: object) -> bool:
        wanted = strategies.MultiWorkerMirroredStrategy if cls is MultiWorkerMirroredStrategy else cls
        return issubclass(type(instance), wanted)


class MultiWorkerMirroredStrategy(strategies.MultiWorkerMirroredStrategy, metaclass=_AlsoByNewName):
    """`mpistrat.MultiWorkerMirroredStrategy` under its former name, with its former arguments.

    ``isinstance`` is true for strategies of both names.

    Parameters
    ----------
    communication : CommunicationImplementation or str
        Family of algorithms to use.
    cluster_resolver : ClusterResolver, optional
        Resolver to compare with MPI.

    Warns
    -----
    DeprecationWarning
        Always: use `mpistrat.MultiWorkerMirroredStrategy`.

    Examples
    --------
    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     strategy = MultiWorkerMirroredStrategy("RING")
    >>> strategy.num_replicas_in_sync
    1
    """

    def __init__(
        self,
        communication: CommunicationImplementation | str = CommunicationImplementation.AUTO,
        cluster_resolver: Any = None,
    ):
        warnings.warn(
            "mpistrat.experimental.MultiWorkerMirroredStrategy is deprecated: use "
            "mpistrat.MultiWorkerMirroredStrategy",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__(cluster_resolver, CommunicationOptions(implementation=communication))
