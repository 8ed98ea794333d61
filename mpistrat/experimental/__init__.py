"""The names of ``tf.distribute.experimental``.

Names load when they are first used: all of them load half of the package, and a program needs few.
"""

from importlib import import_module
from typing import Any

from mpistrat import absent

# Not by `lazy_loader.attach_stub`, which loads from files of this folder alone. The stub has the names for mypy.
_FILES = {
    "collectives": "CollectiveHints CommunicationImplementation CommunicationOptions",
    "collectives.compression": "PowerSGD TopK",
    "experimental": "coordinator partitioners rpc",
    "mesh": "Halo Mesh MeshAxis ShardedArray",
    "monitor.stragglers": "RankStatistics step",
    "monitor.tracing": "trace",
    "strategies": "CentralStorageStrategy ParameterServerStrategy",
    "training.elastic_loop": "ElasticLoop",
    "training.preemption": "PreemptionCheckpointHandler TerminationConfig",
    "training.preemption_exit": "PreemptionWatcher",
    "values": "ValueContext",
}
_LOCATIONS = {name: (file, name) for file, names in _FILES.items() for name in names.split()} | {
    "CollectiveCommunication": ("collectives", "CommunicationImplementation"),
    "MultiWorkerMirroredStrategy": ("strategies.multi_worker_mirrored", "FormerMultiWorkerMirroredStrategy"),
    "TPUStrategy": ("strategies.tpu", "FormerTPUStrategy"),
}
__all__ = sorted(_LOCATIONS)


def _load(name: str) -> Any:
    if name not in _LOCATIONS:
        raise AttributeError(name)
    file, its_name = _LOCATIONS[name]
    if file == "experimental":
        return import_module(f"{__name__}.{name}")
    # Kept in the module, so that the next access does not come here.
    value = globals()[name] = getattr(import_module(f"mpistrat.{file}"), its_name)
    return value


def __dir__() -> list[str]:
    return [*__all__]


__getattr__ = absent.explained(__name__, _load, absent.OF_EXPERIMENTAL)
