"""What tf.distribute keeps under ``experimental``."""

from mpistrat.collectives import CollectiveHints, CommunicationImplementation, CommunicationOptions
from mpistrat.experimental.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpistrat.values import ValueContext

CollectiveCommunication = CommunicationImplementation

__all__ = [
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ValueContext",
]
