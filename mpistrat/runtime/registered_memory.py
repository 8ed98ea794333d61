"""Memory of the host that the ranks of a node share, and that their GPUs write to and read from by themselves."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from mpistrat.runtime.device import cupy_for
from mpistrat.runtime.pinned import address
from mpistrat.runtime.shared_memory import Shared

SLOTS = 3  # one that is copied to, one that is added up, one that is copied from
_FOR_ALL_CONTEXTS = 1  # cudaHostRegisterPortable


class RegisteredMemory:
    """Slots for every rank of a node and for results, registered with CUDA in this process (``cudaHostRegister``).

    Whoever holds one may copy between it and its GPU. The registration ends before the memory goes, whoever goes last:
    by `close`, or with this object; at the end of the process the system takes both.

    Parameters
    ----------
    device : int
        This rank's GPU.
    shared : Shared
        Of `SLOTS` times ``slot_bytes`` for each rank and for all together.
    slot_bytes : int

    Attributes
    ----------
    slots : numpy.ndarray of uint8, shape (ranks, SLOTS, slot_bytes)
    results : numpy.ndarray of uint8, shape (SLOTS, slot_bytes)
    arrived, left : list of cupy.cuda.Event
        Of each of this rank's slots, that it has been copied to; of each result, that it has been copied from.

    Raises
    ------
    RuntimeError
        If CUDA refuses to register it.
    """

    def __init__(self, device: int, shared: Shared, slot_bytes: int):
        self._cupy = cupy = cupy_for("an array on a GPU")
        ranks = len(shared.stretches)
        self.slots = shared.stretches[:, : SLOTS * slot_bytes].reshape(ranks, SLOTS, slot_bytes)
        self.results = shared.common[: SLOTS * slot_bytes].reshape(SLOTS, slot_bytes)
        self._device = device
        runtime = cupy.cuda.runtime
        memory: Any = shared.stretches.base
        with cupy.cuda.Device(device):
            runtime.hostRegister(address(memory), memory.nbytes, _FOR_ALL_CONTEXTS)
            self._end = weakref.finalize(self, _unregister, runtime, memory)
            self._end.atexit = False  # CUDA may have ended
            self._down = cupy.cuda.Stream(non_blocking=True)
            self._up = cupy.cuda.Stream(non_blocking=True)
            self._turn = cupy.cuda.Event(disable_timing=True)
            self.arrived = [cupy.cuda.Event(disable_timing=True) for _ in range(SLOTS)]
            self.left = [cupy.cuda.Event(disable_timing=True) for _ in range(SLOTS)]

    def begin(self) -> None:
        """What the caller's stream still does comes before all copies."""
        self._turn.record(self._cupy.cuda.get_current_stream())
        self._down.wait_event(self._turn)
        self._up.wait_event(self._turn)

    def end(self) -> None:
        """All copies come before what the caller's stream does next."""
        self._turn.record(self._up)
        self._cupy.cuda.get_current_stream().wait_event(self._turn)

    def settle(self) -> None:
        """Wait for all copies."""
        self._down.synchronize()
        self._up.synchronize()

    def fetch(self, slot: np.ndarray, number: int, source: int, nbytes: int) -> None:
        """Begin to copy from the GPU to this rank's slot of that number."""
        runtime = self._cupy.cuda.runtime
        runtime.memcpyAsync(address(slot), source, nbytes, runtime.memcpyDeviceToHost, self._down.ptr)
        self.arrived[number].record(self._down)

    def send(self, number: int, nbytes: int, target: int) -> None:
        """Begin to copy the result of that number to the GPU."""
        runtime = self._cupy.cuda.runtime
        runtime.memcpyAsync(
            target, address(self.results[number]), nbytes, runtime.memcpyHostToDevice, self._up.ptr
        )
        self.left[number].record(self._up)

    def close(self) -> None:
        """End the registration, after all copies."""
        if self._end.alive:
            self.settle()
            with self._cupy.cuda.Device(self._device):
                self._end()


def _unregister(runtime: Any, memory: np.ndarray) -> None:
    """The memory is held until this has run."""
    runtime.hostUnregister(address(memory))
