"""Datasets of rows and batches, and their distribution over the replicas.

Names load when they are first used: importing the package does not import h5py.
"""

import lazy_loader

from mpistrat import absent

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__getattr__ = absent.explained(__name__, __getattr__, absent.OF_DATA)
