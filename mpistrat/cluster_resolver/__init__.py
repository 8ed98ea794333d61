"""Who the other ranks of a program are, read from the environment: one source a file.

Names load when they are first used. Nothing here starts MPI, unless a resolver is given a communicator.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
