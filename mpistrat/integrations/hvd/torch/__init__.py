"""Horovod's calls for PyTorch.

Examples
--------
>>> import torch
>>> import mpistrat.integrations.hvd.torch as hvd
>>> hvd.init()
>>> hvd.allreduce(torch.tensor([1.0, 3.0]), op=hvd.Sum) / hvd.size()
tensor([1., 3.])
"""

import os

try:
    import torch as _torch
except ImportError as error:
    raise ImportError("mpistrat.integrations.hvd.torch needs PyTorch: pip install torch") from error

from mpistrat.integrations.hvd import (
    Adasum,
    Average,
    Max,
    Min,
    Op,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
    allgather_async,
    allgather_object,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall_async,
    barrier,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    broadcast_object,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    grouped_allgather_async,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter_async,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    poll,
    rank,
    reducescatter_async,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    synchronize,
)
from mpistrat.integrations.hvd.left_out import explained as _explained
from mpistrat.integrations.hvd.torch.compression import Compression, Compressor
from mpistrat.integrations.hvd.torch.gradients import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
    sparse_allreduce_async,
)
from mpistrat.integrations.hvd.torch.optimizer import DistributedOptimizer
from mpistrat.integrations.hvd.torch.start_values import broadcast_optimizer_state, broadcast_parameters
from mpistrat.runtime.agreement.operation import skip_in_call_sites

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Op",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "synchronize",
]
HorovodInternalError = RuntimeError  # what collectives raise: MismatchError is a subclass
__getattr__ = _explained(__name__)
skip_in_call_sites(os.path.dirname(_torch.__file__))
