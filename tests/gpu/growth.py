"""Many all-reduces by every route that can be gone: does the memory of the GPU, or of the process, grow?

mpistrat run -n 2 tests/gpu/growth.py --times 10000
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

import cupy
import numpy as np

import mpistrat
from mpistrat.collectives.gpu_all_reduce import obstacles
from mpistrat.experimental import CommunicationOptions

LENGTHS = (1, 1000, 70_001, 3_000_001)  # elements: of each in turn, and lists of all
WARM = 20  # until pools and tables are as large as they get
DEVICE_BYTES, HOST_BYTES = 4 << 20, 64 << 20  # what the driver and Python may take beside it


def used() -> tuple[int, int]:
    """Bytes of the GPU that are not free, and of this process that are in memory."""
    cupy.cuda.Device().synchronize()
    gc.collect()
    free, total = cupy.cuda.Device().mem_info
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return total - free, pages * 4096


def main() -> int:
    """Run; the exit status is 1 if memory grew, or a sum was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=10_000)
    times = parser.parse_args().times
    strategy = mpistrat.MultiWorkerMirroredStrategy(device="cuda")
    topology, device = strategy.extended._topology, strategy.extended._device
    lists = [[cupy.ones(length, np.float32)] for length in LENGTHS]
    lists.append([each for (each,) in lists])
    grew = 0
    for route, text in obstacles(topology, device).items():
        if text:
            if topology.rank == 0:
                print(f"{route}: {text}")
            continue
        options = CommunicationOptions(implementation=route)

        def once(i: int, route: str = route, options: CommunicationOptions = options) -> None:
            values = lists[i % len(lists)]
            totals = strategy.run(lambda: mpistrat.get_replica_context().all_reduce("SUM", values, options))
            if i % 100 == 0 and any(float(each[-1]) != topology.size for each in totals):
                raise SystemExit(f"{route}: a wrong sum, number {i}")

        for i in range(WARM):
            once(i)
        topology.barrier()
        before = used()
        topology.barrier()
        for i in range(times):
            once(i)
        topology.barrier()
        more = [after - each for after, each in zip(used(), before, strict=True)]
        topology.barrier()
        grew |= more[0] > DEVICE_BYTES or more[1] > HOST_BYTES
        text = f"{more[0] / 2**20:+.1f} MiB of the GPU, {more[1] / 2**20:+.1f} MiB of the host"
        for rank, each in enumerate(topology.all_gather_object(text)):
            if topology.rank == 0:
                print(f"{route}, {times} times, rank {rank}: {each}", flush=True)
    return int(grew)


if __name__ == "__main__":
    sys.exit(main())
