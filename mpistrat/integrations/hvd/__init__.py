"""Horovod's calls for NumPy and other arrays. `mpistrat.integrations.hvd.torch` has those for PyTorch.

Horovod negotiates at run time in which order tensors are combined. Here the order is that of the program: ranks that
make other calls, or give them other names, raise on every rank.

Examples
--------
>>> import numpy as np, mpistrat.integrations.hvd as hvd
>>> hvd.init()
>>> hvd.allreduce(np.array([1.0, 3.0]), op=hvd.Sum) / hvd.size()
array([1., 3.])
"""

from mpistrat.integrations.hvd.handles import join as join
from mpistrat.integrations.hvd.handles import poll as poll
from mpistrat.integrations.hvd.handles import synchronize as synchronize
from mpistrat.integrations.hvd.job import ProcessSet as ProcessSet
from mpistrat.integrations.hvd.job import add_process_set as add_process_set
from mpistrat.integrations.hvd.job import ccl_built as ccl_built
from mpistrat.integrations.hvd.job import cross_rank as cross_rank
from mpistrat.integrations.hvd.job import cross_size as cross_size
from mpistrat.integrations.hvd.job import cuda_built as cuda_built
from mpistrat.integrations.hvd.job import ddl_built as ddl_built
from mpistrat.integrations.hvd.job import explained as _explained
from mpistrat.integrations.hvd.job import global_process_set as global_process_set
from mpistrat.integrations.hvd.job import gloo_built as gloo_built
from mpistrat.integrations.hvd.job import gloo_enabled as gloo_enabled
from mpistrat.integrations.hvd.job import init as init
from mpistrat.integrations.hvd.job import is_homogeneous as is_homogeneous
from mpistrat.integrations.hvd.job import is_initialized as is_initialized
from mpistrat.integrations.hvd.job import local_rank as local_rank
from mpistrat.integrations.hvd.job import local_size as local_size
from mpistrat.integrations.hvd.job import mpi_built as mpi_built
from mpistrat.integrations.hvd.job import mpi_enabled as mpi_enabled
from mpistrat.integrations.hvd.job import mpi_threads_supported as mpi_threads_supported
from mpistrat.integrations.hvd.job import nccl_built as nccl_built
from mpistrat.integrations.hvd.job import rank as rank
from mpistrat.integrations.hvd.job import remove_process_set as remove_process_set
from mpistrat.integrations.hvd.job import rocm_built as rocm_built
from mpistrat.integrations.hvd.job import shutdown as shutdown
from mpistrat.integrations.hvd.job import size as size
from mpistrat.integrations.hvd.moves import allgather as allgather
from mpistrat.integrations.hvd.moves import allgather_async as allgather_async
from mpistrat.integrations.hvd.moves import allgather_object as allgather_object
from mpistrat.integrations.hvd.moves import alltoall as alltoall
from mpistrat.integrations.hvd.moves import alltoall_async as alltoall_async
from mpistrat.integrations.hvd.moves import barrier as barrier
from mpistrat.integrations.hvd.moves import broadcast as broadcast
from mpistrat.integrations.hvd.moves import broadcast_ as broadcast_
from mpistrat.integrations.hvd.moves import broadcast_async as broadcast_async
from mpistrat.integrations.hvd.moves import broadcast_async_ as broadcast_async_
from mpistrat.integrations.hvd.moves import broadcast_object as broadcast_object
from mpistrat.integrations.hvd.moves import grouped_allgather as grouped_allgather
from mpistrat.integrations.hvd.moves import grouped_allgather_async as grouped_allgather_async
from mpistrat.integrations.hvd.reductions import Adasum as Adasum
from mpistrat.integrations.hvd.reductions import Average as Average
from mpistrat.integrations.hvd.reductions import Max as Max
from mpistrat.integrations.hvd.reductions import Min as Min
from mpistrat.integrations.hvd.reductions import Op as Op
from mpistrat.integrations.hvd.reductions import Product as Product
from mpistrat.integrations.hvd.reductions import Sum as Sum
from mpistrat.integrations.hvd.reductions import allreduce as allreduce
from mpistrat.integrations.hvd.reductions import allreduce_ as allreduce_
from mpistrat.integrations.hvd.reductions import allreduce_async as allreduce_async
from mpistrat.integrations.hvd.reductions import allreduce_async_ as allreduce_async_
from mpistrat.integrations.hvd.reductions import grouped_allreduce as grouped_allreduce
from mpistrat.integrations.hvd.reductions import grouped_allreduce_ as grouped_allreduce_
from mpistrat.integrations.hvd.reductions import grouped_allreduce_async as grouped_allreduce_async
from mpistrat.integrations.hvd.reductions import grouped_allreduce_async_ as grouped_allreduce_async_
from mpistrat.integrations.hvd.reductions import grouped_reducescatter as grouped_reducescatter
from mpistrat.integrations.hvd.reductions import grouped_reducescatter_async as grouped_reducescatter_async
from mpistrat.integrations.hvd.reductions import reducescatter as reducescatter
from mpistrat.integrations.hvd.reductions import reducescatter_async as reducescatter_async

__all__ = [
    name
    for name, each in [*globals().items()]
    if name[0] != "_" and getattr(each, "__module__", "").startswith(__name__)
]
HorovodInternalError = RuntimeError  # what collectives raise: MismatchError is a subclass
__getattr__ = _explained(__name__)
