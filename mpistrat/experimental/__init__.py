"""The names of ``tf.distribute.experimental``."""

from mpistrat import absent
from mpistrat.collectives import CollectiveHints, CommunicationImplementation, CommunicationOptions
from mpistrat.experimental import coordinator, partitioners
from mpistrat.monitor.stragglers import RankStatistics, step
from mpistrat.monitor.tracing import trace
from mpistrat.strategies import CentralStorageStrategy, ParameterServerStrategy
from mpistrat.strategies.multi_worker_mirrored import FormerMultiWorkerMirroredStrategy
from mpistrat.training.preemption.config import TerminationConfig
from mpistrat.training.preemption.handler import PreemptionCheckpointHandler
from mpistrat.training.preemption.watcher import PreemptionWatcher
from mpistrat.values import ValueContext

CollectiveCommunication = CommunicationImplementation
MultiWorkerMirroredStrategy = FormerMultiWorkerMirroredStrategy

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "RankStatistics",
    "TerminationConfig",
    "ValueContext",
    "coordinator",
    "partitioners",
    "step",
    "trace",
]

__getattr__ = absent.explained(__name__, absent.nothing, absent.OF_EXPERIMENTAL)
