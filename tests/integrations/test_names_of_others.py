"""Every name of a library that this one follows is here, or an error says what to use."""

import functools
import importlib
import inspect

import pytest

import mpistrat
from mpistrat import absent, data, experimental, metrics, optimizers
from mpistrat.data import Dataset

# Where a library has names, where this one would have them, and its table of others.
PLACES = {
    "keras.metrics": (metrics, absent.OF_METRICS),
    "keras.optimizers": (optimizers, absent.OF_OPTIMIZERS),
    "torch.optim": (optimizers, absent.OF_OPTIMIZERS),
    "keras.optimizers.Optimizer": (optimizers.Adam, absent.OF_OPTIMIZER),
    "torch.optim.Optimizer": (optimizers.Adam, absent.OF_OPTIMIZER),
    "tensorflow.data.Dataset": (Dataset, absent.OF_DATASET),
    "tensorflow.data": (data, absent.OF_DATA),
    "torch.utils.data": (data, absent.OF_DATA),
    "tensorflow.distribute": (mpistrat, absent.OF_DISTRIBUTE),
    "tensorflow.distribute.experimental": (experimental, absent.OF_EXPERIMENTAL),
    "tensorflow.distribute.Strategy": (mpistrat.MultiWorkerMirroredStrategy, absent.OF_STRATEGY),
}
# Names that no program of theirs writes: of the library's own machinery.
OTHERS = {
    "torch.optim.Optimizer": {"OptimizerPreHook", "OptimizerPostHook", "profile_hook_step"},
    "keras.optimizers.Optimizer": set(),
    "torch.utils.data": {
        "argument_validation",
        "dataloader",
        "datapipes",
        "distributed",
        "functional_datapipe",
        "graph",
    }
    | {"graph_settings", "guaranteed_datapipes_determinism", "non_deterministic", "runtime_validation", "sampler"}
    | {"runtime_validation_disabled", "DFIterDataPipe"},
}


def find(place):
    """A module or a class by its path; without its library the test is skipped."""
    library, *path = place.split(".")
    try:
        found = importlib.import_module(library)
    except (ImportError, ValueError):
        pytest.skip(f"{library} is not installed")
    return functools.reduce(getattr, path, found)  # not import_module: tensorflow/distribute is another folder


def names(owner):
    """The public names of a module or class that it or its library defines."""
    for name in dir(owner):
        value = inspect.getattr_static(owner, name)
        if name.startswith("_") or (inspect.ismodule(value) and not hasattr(value, "__path__")):
            continue
        yield name


@pytest.mark.parametrize("place", PLACES)
def test_names(place, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    mine, table = PLACES[place]
    theirs = set(names(find(place))) - OTHERS.get(place, set())
    assert len(theirs) > 5
    unknown = {name for name in theirs if not hasattr(mine, name) and name not in table}
    assert unknown == set()


# The public names of horovod.torch (Horovod 0.28), which has no wheels to ask.
HOROVOD = """
Adasum Average Compression DistributedOptimizer HorovodInternalError HostsUpdatedInterrupt Max Min ProcessSet Product
Sum SyncBatchNorm add_process_set allgather allgather_async allgather_object allreduce allreduce_ allreduce_async
allreduce_async_ alltoall alltoall_async barrier broadcast broadcast_ broadcast_async broadcast_async_ broadcast_object
broadcast_optimizer_state broadcast_parameters ccl_built cross_rank cross_size cuda_built ddl_built elastic
global_process_set gloo_built gloo_enabled grouped_allgather grouped_allgather_async grouped_allreduce
grouped_allreduce_ grouped_allreduce_async
grouped_allreduce_async_ grouped_reducescatter grouped_reducescatter_async init is_homogeneous
is_initialized join local_rank local_size mpi_built mpi_enabled mpi_threads_supported nccl_built poll rank
reducescatter reducescatter_async remove_process_set rocm_built run shutdown size sparse_allreduce_async start_timeline
stop_timeline synchronize
"""


def test_names_of_horovod():
    find("torch")
    hvd = importlib.import_module("mpistrat.integrations.hvd.torch")
    missing = [name for name in HOROVOD.split() if not hasattr(hvd, name)]
    assert missing
    for name in missing:
        with pytest.raises(AttributeError, match=f"has no '{name}': use "):
            getattr(hvd, name)
