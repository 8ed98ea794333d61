"""Names of other libraries that this one does not have, and what to use in their place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

_START = "strategy = mpistrat.MultiWorkerMirroredStrategy(); MPI knows the ranks"
_END = "nothing: MPI ends with the program"
_ALL_REDUCE = "strategy.all_reduce(), or mpistrat.get_replica_context().all_reduce() in a replica function"
_ALL_GATHER = "strategy.gather(), or mpistrat.get_replica_context().all_gather() in a replica function"
_SCATTER = "mpistrat.get_replica_context().experimental_reduce_scatter()"
_OPTIMIZER = "mpistrat.optimizers: apply_gradients() sums the gradients of all replicas"
_START_EQUAL = "mpistrat.Variable: in strategy.scope() it starts with the value of replica 0"

# A name of tf.distribute, Horovod or torch.distributed -> what to use.
OF_DISTRIBUTE = {
    "AUTOTUNE": "mpistrat.data.AUTOTUNE",
    "Dataset": "mpistrat.data.Dataset",
    "Options": "mpistrat.data.Options",
    "CommunicationImplementation": "mpistrat.experimental.CommunicationImplementation",
    "CommunicationOptions": "mpistrat.experimental.CommunicationOptions",
    "PreemptionCheckpointHandler": "mpistrat.experimental.PreemptionCheckpointHandler",
    "TerminationConfig": "mpistrat.experimental.TerminationConfig",
    "ValueContext": "mpistrat.experimental.ValueContext",
    "Optimizer": "mpistrat.optimizers.Optimizer",
    "SGD": "mpistrat.optimizers.SGD",
    "Adam": "mpistrat.optimizers.Adam",
    "AdamW": "mpistrat.optimizers.AdamW",
    "SlurmClusterResolver": "mpistrat.cluster_resolver.SlurmClusterResolver",
    "TFConfigClusterResolver": "mpistrat.cluster_resolver.TFConfigClusterResolver",
    "TPUStrategy": "mpistrat.MultiWorkerMirroredStrategy, on CPUs and GPUs",
    "init": _START,
    "init_process_group": _START,
    "shutdown": _END,
    "destroy_process_group": _END,
    "rank": "strategy.comm.rank",
    "get_rank": "strategy.comm.rank",
    "size": "strategy.num_replicas_in_sync",
    "get_world_size": "strategy.num_replicas_in_sync",
    "local_rank": 'device="cuda" of a strategy, which gives each rank of a node its own GPU',
    "allreduce": _ALL_REDUCE,
    "all_reduce": _ALL_REDUCE,
    "grouped_allreduce": _ALL_REDUCE,
    "reduce": _ALL_REDUCE,
    "allgather": _ALL_GATHER,
    "all_gather": _ALL_GATHER,
    "gather": _ALL_GATHER,
    "reducescatter": _SCATTER,
    "reduce_scatter": _SCATTER,
    "broadcast": "strategy.broadcast()",
    "scatter": "strategy.scatter()",
    "barrier": "strategy.barrier()",
    "DistributedOptimizer": _OPTIMIZER,
    "DistributedGradientTape": _OPTIMIZER,
    "DistributedDataParallel": _OPTIMIZER,
    "DistributedSampler": "strategy.experimental_distribute_dataset()",
    "broadcast_parameters": _START_EQUAL,
    "broadcast_variables": _START_EQUAL,
    "broadcast_object": "strategy.broadcast_object()",
    "allgather_object": "strategy.gather_object()",
}
# A name of tf.data or torch.utils.data -> what to use.
OF_DATA = {
    "TFRecordDataset": "mpistrat.data.Dataset.from_hdf5() or from_parquet()",
    "TextLineDataset": "mpistrat.data.Dataset.from_iterable()",
    "CsvDataset": "mpistrat.data.Dataset.from_csv()",
    "FixedLengthRecordDataset": "mpistrat.data.Dataset.from_sequence() of a numpy.memmap",
    "Iterator": "iter() of a dataset",
    "DataLoader": "mpistrat.data.Dataset",
    "TensorDataset": "mpistrat.data.Dataset.from_arrays()",
}


def explained(module: str, find: Callable[[str], Any], instead: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` whose error says what to use in place of a missing name.

    Parameters
    ----------
    module : str
        The name of the module.
    find : callable
        The ``__getattr__`` that finds the names that the module has.
    instead : mapping
        Names that the module does not have, and what to use.
    """

    def __getattr__(name: str) -> Any:
        try:
            return find(name)
        except AttributeError:
            if name in dir(sys.modules[module]):  # raised by the file that has the name, or by its imports
                raise
            advice = f": use {instead[name]}" if name in instead else ""
        # Python suggests a similar name if the error has the module and the name.
        raise AttributeError(f"{module} has no {name!r}{advice}", name=name, obj=sys.modules[module])

    return __getattr__
