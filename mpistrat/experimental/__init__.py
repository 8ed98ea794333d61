"""The names of ``tf.distribute.experimental``."""

from mpistrat import absent
from mpistrat.collectives import CollectiveHints, CommunicationImplementation, CommunicationOptions
from mpistrat.collectives.compression import PowerSGD, TopK
from mpistrat.experimental import coordinator, partitioners, rpc
from mpistrat.mesh import Halo, Mesh, MeshAxis, ShardedArray
from mpistrat.monitor.stragglers import RankStatistics, step
from mpistrat.monitor.tracing import trace
from mpistrat.strategies import CentralStorageStrategy, ParameterServerStrategy
from mpistrat.strategies.multi_worker_mirrored import FormerMultiWorkerMirroredStrategy
from mpistrat.strategies.tpu import FormerTPUStrategy
from mpistrat.training.preemption.config import TerminationConfig
from mpistrat.training.preemption.handler import PreemptionCheckpointHandler
from mpistrat.training.preemption.watcher import PreemptionWatcher
from mpistrat.values import ValueContext

CollectiveCommunication = CommunicationImplementation
MultiWorkerMirroredStrategy = FormerMultiWorkerMirroredStrategy
TPUStrategy = FormerTPUStrategy

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "Halo",
    "Mesh",
    "MeshAxis",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PowerSGD",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "RankStatistics",
    "ShardedArray",
    "TPUStrategy",
    "TerminationConfig",
    "TopK",
    "ValueContext",
    "coordinator",
    "partitioners",
    "rpc",
    "step",
    "trace",
]

__getattr__ = absent.explained(__name__, absent.nothing, absent.OF_EXPERIMENTAL)
