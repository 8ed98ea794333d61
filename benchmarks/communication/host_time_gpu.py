"""The host's time to pack, unpack and update many arrays on a GPU, with the real CuPy and no GPU.

Arrays have invented addresses, and launches do nothing. What remains is the time that the host needs before the GPU can
begin. In it the GPU has no work, if the step has little.

    python benchmarks/communication/host_time_gpu.py [--arrays 160,1000]

Needs CuPy alone: pip install cupy-cuda12x
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
import types
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np

from mpistrat.collectives import reduction
from mpistrat.collectives.gpu import route as on_gpu
from mpistrat.optimizers import Adam
from mpistrat.values import ReduceOp


def without_a_gpu() -> None:
    """Replace what would need one: the allocator, the current device and stream, copies and launches."""
    places = itertools.count(1 << 40, 1 << 30)

    def allocate(nbytes: int) -> Any:
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(next(places), max(nbytes, 1), None, 0), 0)

    cupy.cuda.set_allocator(allocate)
    cupy.cuda.runtime.getDevice = lambda: 0
    cupy.cuda.get_current_stream = lambda: types.SimpleNamespace(ptr=0)
    cupy.RawKernel = lambda *_, **__: lambda grid, block, arguments: None
    cupy.asarray = lambda array: cupy.empty(array.shape, array.dtype)


def microseconds(action: Callable[[], object], calls: int = 50, repetitions: int = 21) -> float:
    """Return the median over repetitions of the time of the processor for one call: nothing waits here."""
    taken = []
    for _ in range(repetitions):
        start = time.process_time()
        for _ in range(calls):
            action()
        taken.append((time.process_time() - start) / calls)
    return float(np.median(taken)) * 1e6


def lists(number: int, names: int) -> list[list[Any]]:
    """Return lists of arrays of 5 MB in three shapes, as a network has them."""
    shapes = [(1000, 1250), (1250000,), (50, 25, 1000)]
    return [[cupy.empty(shapes[i % 3], np.float32) for i in range(number)] for _ in range(names)]


def rows(number: int) -> dict[str, float]:
    """Return the microseconds of each action with so many arrays."""
    gradients, *state = lists(number, 4)
    limits = reduction.MessageSizes(math.inf, math.inf, math.inf)
    key = tuple((each.dtype, each.shape) for each in gradients)
    (message,) = reduction.packed_messages(ReduceOp.SUM, key, 2, {np.dtype(np.float32): limits})
    layout, out = on_gpu.MessageLayout.of(message), [None] * number
    send = on_gpu.pack_values(layout, gradients).send
    total = cupy.empty(message.length, message.result)
    # The pool gives the same memory in each step of a training loop.
    original, cupy.empty = cupy.empty, lambda shape, dtype: send if dtype == message.source else total
    packed = microseconds(lambda: on_gpu.pack_values(layout, gradients))
    cupy.empty = original
    kernel, scalars = Adam(0.001).on_gpu(1, 0.001)
    lists_of_adam = [gradients, *state]
    return {
        "pack": packed,
        "unpack": microseconds(lambda: on_gpu.unpack(layout, total, out)),
        "the least of unpack: a view of each, by CuPy": microseconds(lambda: [each.view() for each in gradients]),
        "Adam": microseconds(lambda: kernel(lists_of_adam, scalars)),
    }


def main() -> None:
    """Print a line for each action and number of arrays."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arrays", default="160,1000")
    arguments = parser.parse_args()
    without_a_gpu()
    print(f"CuPy {cupy.__version__}")
    for number in map(int, arguments.arrays.split(",")):
        for name, taken in rows(number).items():
            print(f"{number:6d} arrays  {name:46s} {taken:9.1f} us")


if __name__ == "__main__":
    main()
