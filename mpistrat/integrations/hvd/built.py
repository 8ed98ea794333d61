"""What Horovod was built with: here, MPI."""

from __future__ import annotations


def mpi_built() -> bool:
    """Return True: this library communicates by MPI.

    Examples
    --------
    >>> import mpistrat.integrations.hvd as hvd
    >>> hvd.mpi_built(), hvd.nccl_built()
    (True, 0)
    """
    return True


mpi_enabled = mpi_built


def mpi_threads_supported() -> bool:
    """Return False: one thread at a time may communicate.

    Examples
    --------
    >>> import mpistrat.integrations.hvd as hvd
    >>> hvd.mpi_threads_supported()
    False
    """
    return False


def gloo_built() -> bool:
    """Return False, as the functions for other ways to communicate do.

    Examples
    --------
    >>> import mpistrat.integrations.hvd as hvd
    >>> hvd.gloo_built(), hvd.gloo_enabled(), hvd.ddl_built(), hvd.ccl_built(), hvd.cuda_built(), hvd.rocm_built()
    (False, False, False, False, False, False)
    """
    return False


gloo_enabled = ddl_built = ccl_built = cuda_built = rocm_built = gloo_built


def nccl_built() -> int:
    """Return 0: tensors on GPUs go through the memory of the host.

    Examples
    --------
    >>> import mpistrat.integrations.hvd as hvd
    >>> hvd.nccl_built()
    0
    """
    return 0
