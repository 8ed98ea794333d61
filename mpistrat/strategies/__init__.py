"""The strategies: one per file."""

from mpistrat.strategies.central_storage import CentralStorageStrategy
from mpistrat.strategies.mirrored import MirroredStrategy
from mpistrat.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpistrat.strategies.one_device import OneDeviceStrategy
from mpistrat.strategies.parameter_server import ParameterServerStrategy

__all__ = [
    "CentralStorageStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
]
