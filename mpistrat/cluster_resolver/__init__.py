"""The ranks of a program and their nodes, read from the environment: one source per file.

Names load when they are first used. A resolver starts MPI only if it is given a communicator.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
