"""Memory of a GPU that other processes and MPI libraries can open: CUDA's own, and no part of a pool of CuPy's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.runtime.device import cupy_for


def allocate(nbytes: int) -> Any:
    """Bytes on the current GPU, with any values, as a CuPy array that begins where the allocation does."""
    cupy = cupy_for("memory of a GPU")
    return cupy.ndarray((nbytes,), np.uint8, memptr=cupy.cuda.MemoryPointer(cupy.cuda.Memory(nbytes), 0))


class Windows:
    """Memory on the GPUs of the ranks of a node, which all of them see (CUDA's inter-process communication).

    Attributes
    ----------
    rows : list of cupy.ndarray of uint8
        Each rank's, in the order of local ranks: this one's own, the others' as they are mapped here.
    left : cupy.cuda.Event
        The last use of them in this process, in whichever stream.
    """

    def __init__(self, device: int, own: Any):
        cupy = cupy_for("memory of a GPU")
        self._cupy, self._device, self._own = cupy, device, own
        self._opened: list[int] = []
        self.rows: list[Any] = []
        self.left = cupy.cuda.Event(disable_timing=True)

    def handle(self) -> bytes:
        """What another process opens this rank's memory by.

        Raises
        ------
        RuntimeError
            If the GPU or the container cannot.
        """
        return bytes(self._cupy.cuda.runtime.ipcGetMemHandle(int(self._own.data.ptr)))

    def open(self, handles: Sequence[bytes], rank: int) -> None:
        """Map the memory of all but this ``rank``.

        Raises
        ------
        RuntimeError
            If one cannot be reached from here: no way between two GPUs, processes that are kept apart.
        """
        cuda, nbytes = self._cupy.cuda, self._own.nbytes
        for other, handle in enumerate(handles):
            if other == rank:
                self.rows.append(self._own)
                continue
            address = int(cuda.runtime.ipcOpenMemHandle(handle))
            self._opened.append(address)
            memory = cuda.UnownedMemory(address, nbytes, self, self._device)
            self.rows.append(self._cupy.ndarray((nbytes,), np.uint8, memptr=cuda.MemoryPointer(memory, 0)))

    def close(self) -> None:
        """Let go of the others' memory. Only after all have may one of them free its own."""
        self.left.synchronize()
        self.rows.clear()
        with self._cupy.cuda.Device(self._device):
            while self._opened:
                self._cupy.cuda.runtime.ipcCloseMemHandle(self._opened.pop())
