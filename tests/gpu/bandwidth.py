"""The kernels that pack and update against a copy on the GPU: bytes read and written in a second.

mpistrat run -n 1 tests/gpu/bandwidth.py
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import cupy
import ml_dtypes
import numpy as np

from mpistrat.arrays.gpu.kernels import copy_each
from mpistrat.optimizers import SGD, Adam


def seconds(action: Callable[[], object], repetitions: int) -> float:
    """The median of some repetitions, each of several calls."""
    wait = cupy.cuda.get_current_stream().synchronize
    calls, taken = 5, []
    for _ in range(repetitions + 1):
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            action()
        wait()
        taken.append((time.perf_counter() - start) / calls)
    return float(np.median(taken[1:]))


def main() -> int:
    """Print a line for each kernel and dtype."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--json", type=Path, help="bytes in a second of each")
    arguments = parser.parse_args()
    nbytes = arguments.megabytes << 20

    rates: dict[str, float] = {}

    def report(what: str, action: Callable[[], object], moved: int) -> float:
        found = moved / seconds(action, arguments.repetitions)
        share = f"{found / bound:6.1%} of the copy" if bound else ""
        rates[what] = found
        if arguments.json:
            arguments.json.write_text(json.dumps(rates, indent=1) + "\n")
        print(f"{what:<36} {found / 1e9:9.1f} GB/s  {share}", flush=True)
        return found

    bound = 0.0
    a, b = cupy.zeros(nbytes // 4, np.float32), cupy.zeros(nbytes // 4, np.float32)

    def copy() -> None:
        b[...] = a

    bound = report("a copy on the GPU", copy, 2 * nbytes)
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16, np.float64):
        name, size = np.dtype(dtype).name, np.dtype(dtype).itemsize
        for pieces in (1, 64, 1000):
            length = nbytes // size // pieces
            of_many = [[each[i * length : (i + 1) * length] for i in range(pieces)] for each in flat(a, b, dtype)]
            report(
                f"pack {pieces} arrays of {name}",
                lambda of_many=of_many: copy_each(*of_many),
                2 * pieces * length * size,
            )
        for optimizer, lists, moved in ((SGD(0.1), 2, 3), (SGD(0.1, momentum=0.9), 3, 5), (Adam(0.01), 4, 7)):
            arrays = [cupy.zeros(nbytes // size, np.float16 if size == 2 else dtype) for _ in range(lists)]
            arrays = [each.view(dtype) for each in arrays]
            kernel, numbers = optimizer.on_gpu(1, 0.1)
            report(
                f"update by {kernel._name} of {name}",
                lambda kernel=kernel, arrays=arrays, numbers=numbers: kernel([[each] for each in arrays], numbers),
                moved * nbytes,
            )
    return 0


def flat(a: cupy.ndarray, b: cupy.ndarray, dtype: type) -> tuple[cupy.ndarray, cupy.ndarray]:
    """The same memory as arrays of another dtype."""
    return a.view(dtype), b.view(dtype)


if __name__ == "__main__":
    sys.exit(main())
