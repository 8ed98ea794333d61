"""The API of tf.distribute on MPI: one rank, one device, one replica.

Names load when they are first used: importing the package starts no MPI, h5py or cupy.
"""

import lazy_loader

from mpistrat import absent
from mpistrat.version import __version__

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__getattr__ = absent.explained(__name__, __getattr__, absent.OF_DISTRIBUTE)
__all__ += ["__version__"]
