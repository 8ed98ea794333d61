"""The few functions of the CUDA driver that the package calls."""

from cupy.cuda import runtime


def ctxGetCurrent():
    """Not 0 if this thread has used a device."""
    return int(getattr(runtime.local, "context", False))
