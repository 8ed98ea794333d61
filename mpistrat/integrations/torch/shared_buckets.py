"""Gradients of `DistributedDataParallel` that are reduced in place.

DDP allocates the memory of its buckets in C++. Torch can move the memory of a tensor, with all views of it, into a
file in memory: its processes share tensors in this way. The ranks of a node map each other's files, and combine the
buckets there without copies.
"""

# Without postponed annotations: torch reads the annotations of `reduce_in_place` as types.

import contextlib
import os
from typing import Any

import numpy as np
import torch
from torch.distributed import GradBucket
from torch.multiprocessing.reductions import StorageWeakRef

from mpistrat.arrays import arrays
from mpistrat.collectives import arena
from mpistrat.integrations.torch.process_group import ProcessGroup
from mpistrat.integrations.torch.work import devices_of
from mpistrat.memory.node import FOLDER


class SharedBuckets:
    """The buckets of one model, in memory that the ranks of a node share: the state of `reduce_in_place`.

    Memory moves when a bucket is reduced for the first time. Where this is not possible (on a GPU, or if the node has
    too little shared memory), the bucket stays where it is and is reduced as any other tensor.

    Parameters
    ----------
    process_group : ProcessGroup, optional
        That of the model; by default the one of all ranks.

    Examples
    --------
    >>> model.register_comm_hook(SharedBuckets(), reduce_in_place)  # doctest: +SKIP
    """

    def __init__(self, process_group: Any = None):
        group = torch.distributed.group.WORLD if process_group is None else process_group
        if not isinstance(group, ProcessGroup):
            raise TypeError(f"SharedBuckets needs a process group of the backend mpistrat, not {type(group).__name__}")
        self.process_group = group
        self._arrays: dict[StorageWeakRef, np.ndarray | None] = {}

    def in_arena(self, tensor: torch.Tensor) -> np.ndarray | None:
        """Return a bucket as an array in an arena; None if it stays in memory of its own. Collective if it is new.

        Raise ValueError if the tensor is a part of its memory.
        """
        if tensor.nbytes != tensor.untyped_storage().nbytes() or not tensor.is_contiguous():
            raise ValueError("a bucket must be a contiguous tensor that has its memory for itself")
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage in self._arrays:
            return self._arrays[storage]
        # DDP makes new buckets once, after the first step.
        self._arrays = {known: array for known, array in self._arrays.items() if not known.expired()}
        dtype = arrays.dtype_and_shape(tensor[:0])[0]
        descriptor = self._moved(tensor)
        array = arena.buffer_on_file(self.process_group.topology, descriptor, dtype, tensor.numel())
        self._arrays[storage] = array
        return array

    def _moved(self, tensor: torch.Tensor) -> int | None:
        """Move the memory of a tensor to a file, and return the descriptor, which belongs to torch."""
        topology, storage = self.process_group.topology, tensor.untyped_storage()
        move = getattr(storage, "_share_fd_cpu_", None)  # torch has no public name for it
        if tensor.device.type != "cpu" or topology.memory is None or move is None:
            return None
        needed = 2 * topology.node.size * storage.nbytes()  # twice: MPI needs shared memory later
        with contextlib.suppress(OSError, RuntimeError):  # torch raises them if the system refuses
            system = os.statvfs(FOLDER)
            if needed <= system.f_bavail * system.f_frsize:
                descriptor, nbytes = move()
                os.posix_fallocate(descriptor, 0, nbytes)
                return int(descriptor)
        return None


def reduce_in_place(state: SharedBuckets, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients of a bucket over all ranks: a communication hook of `DistributedDataParallel`.

    Use it with ``gradient_as_bucket_view=True``, so that gradients are not copied out of the buckets.

    Parameters
    ----------
    state : SharedBuckets
        The memory of the model's buckets.
    bucket : torch.distributed.GradBucket
        The bucket that DDP reduces.

    Returns
    -------
    torch.futures.Future
        The bucket's tensor. It is complete.

    Examples
    --------
    >>> model.register_comm_hook(SharedBuckets(), reduce_in_place)  # doctest: +SKIP
    """
    tensor = bucket.buffer()
    group = state.process_group
    array = state.in_arena(tensor)
    if array is None:
        options = torch.distributed.AllreduceOptions()
        options.reduceOp = torch.distributed.ReduceOp.AVG
        group.allreduce([tensor], options)
    else:
        group.average_buffer(array)
    future: Any = torch.futures.Future(devices=devices_of([tensor]))
    future.set_result(tensor)
    return future
