"""Horovod's calls for NumPy and other arrays. `mpistrat.integrations.hvd.torch` has those for PyTorch.

Horovod negotiates at run time in which order tensors are combined. Here the program defines the order: ranks that
make other calls, or give them other names, raise on every rank.

Examples
--------
>>> import numpy as np, mpistrat.integrations.hvd as hvd
>>> hvd.init()
>>> hvd.allreduce(np.array([1.0, 3.0]), op=hvd.Sum) / hvd.size()
array([1., 3.])
"""

from mpistrat.integrations.hvd import handles as _handles
from mpistrat.integrations.hvd import job as _job
from mpistrat.integrations.hvd import moves as _moves
from mpistrat.integrations.hvd import reductions as _reductions
from mpistrat.integrations.hvd.handles import *  # noqa: F403
from mpistrat.integrations.hvd.job import *  # noqa: F403
from mpistrat.integrations.hvd.job import explained as _explained
from mpistrat.integrations.hvd.moves import *  # noqa: F403
from mpistrat.integrations.hvd.reductions import *  # noqa: F403

__all__: list[str] = []
__all__ += _handles.__all__
__all__ += _job.__all__
__all__ += _moves.__all__
__all__ += _reductions.__all__
HorovodInternalError = RuntimeError  # what collectives raise: MismatchError is a subclass
__getattr__ = _explained(__name__)
