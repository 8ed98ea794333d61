"""The place in which Horovod has its calls for Keras: ``import mpistrat.integrations.hvd.tensorflow.keras as hvd``."""

import sys

from mpistrat.integrations.hvd import keras
from mpistrat.integrations.hvd.job import explained

for _name, _module in (("keras", keras), ("keras.callbacks", keras.callbacks)):
    sys.modules[f"{__name__}.{_name}"] = _module
__getattr__ = explained(__name__)
