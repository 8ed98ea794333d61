"""Horovod's calls for Keras 3, on PyTorch, JAX and TensorFlow. It is `mpistrat.integrations.hvd.tensorflow.keras`, too.

Examples
--------
>>> import mpistrat.integrations.hvd.keras as hvd  # doctest: +SKIP
>>> hvd.init()  # doctest: +SKIP
>>> model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size())), "mse")  # doctest: +SKIP
>>> model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])  # doctest: +SKIP
"""

from mpistrat.integrations import hvd as _hvd
from mpistrat.integrations.hvd import *  # noqa: F403  # the calls for arrays, of any library
from mpistrat.integrations.hvd.job import explained as _explained
from mpistrat.integrations.hvd.keras import callbacks
from mpistrat.integrations.hvd.keras.callbacks import broadcast_global_variables
from mpistrat.integrations.hvd.keras.optimizer import (
    Compression,
    DistributedOptimizer,
    PartialDistributedOptimizer,
    load_model,
)

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "broadcast_global_variables",
    "callbacks",
    "load_model",
]
__all__ += _hvd.__all__
HorovodInternalError = RuntimeError  # what collectives raise: MismatchError is a subclass
__getattr__ = _explained(__name__)
