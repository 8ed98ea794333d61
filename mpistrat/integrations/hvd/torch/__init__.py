"""Horovod's calls for PyTorch.

Examples
--------
>>> import torch, mpistrat.integrations.hvd.torch as hvd
>>> hvd.init()
>>> hvd.allreduce(torch.tensor([1.0, 3.0]), op=hvd.Sum) / hvd.size()
tensor([1., 3.])
"""

import os

try:
    import torch as _torch
except ImportError as error:
    raise ImportError("mpistrat.integrations.hvd.torch needs PyTorch: pip install torch") from error

from mpistrat.integrations import hvd as _hvd
from mpistrat.integrations.hvd import *  # noqa: F403  # the calls that are equal for tensors
from mpistrat.integrations.hvd.job import explained as _explained
from mpistrat.integrations.hvd.torch.gradients import (  # some take a compression, too
    Compression,
    Compressor,
    allgather,
    allreduce,
    alltoall,
    broadcast,
    broadcast_optimizer_state,
    broadcast_parameters,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
    sparse_allreduce_async,
)
from mpistrat.integrations.hvd.torch.optimizer import DistributedOptimizer
from mpistrat.process.own_files import skip_in_call_sites

__all__ = [
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
    "sparse_allreduce_async",
]
__all__ += _hvd.__all__
HorovodInternalError = RuntimeError  # what collectives raise: MismatchError is a subclass
__getattr__ = _explained(__name__)
skip_in_call_sites(os.path.dirname(_torch.__file__))
