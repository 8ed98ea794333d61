from mpistrat.collectives import CollectiveHints as CollectiveHints
from mpistrat.collectives import CommunicationImplementation as CommunicationImplementation
from mpistrat.collectives import CommunicationOptions as CommunicationOptions
from mpistrat.collectives.compression import PowerSGD as PowerSGD
from mpistrat.collectives.compression import TopK as TopK
from mpistrat.experimental import coordinator as coordinator
from mpistrat.experimental import partitioners as partitioners
from mpistrat.experimental import rpc as rpc
from mpistrat.mesh import Halo as Halo
from mpistrat.mesh import Mesh as Mesh
from mpistrat.mesh import MeshAxis as MeshAxis
from mpistrat.mesh import ShardedArray as ShardedArray
from mpistrat.monitor.stragglers import RankStatistics as RankStatistics
from mpistrat.monitor.stragglers import step as step
from mpistrat.monitor.tracing import trace as trace
from mpistrat.strategies import CentralStorageStrategy as CentralStorageStrategy
from mpistrat.strategies import ParameterServerStrategy as ParameterServerStrategy
from mpistrat.strategies.multi_worker_mirrored import FormerMultiWorkerMirroredStrategy
from mpistrat.strategies.tpu import FormerTPUStrategy
from mpistrat.training.elastic_loop import ElasticLoop as ElasticLoop
from mpistrat.training.preemption import PreemptionCheckpointHandler as PreemptionCheckpointHandler
from mpistrat.training.preemption import TerminationConfig as TerminationConfig
from mpistrat.training.preemption_exit import PreemptionWatcher as PreemptionWatcher
from mpistrat.values import ValueContext as ValueContext

CollectiveCommunication = CommunicationImplementation
MultiWorkerMirroredStrategy = FormerMultiWorkerMirroredStrategy
TPUStrategy = FormerTPUStrategy
