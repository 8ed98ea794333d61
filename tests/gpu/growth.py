"""Many all-reduces by every route that can be gone: does the memory of the GPU, or of the process, grow?

mpistrat run -n 2 tests/gpu/growth.py --times 10000
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import cupy
import numpy as np

import mpistrat
from mpistrat.collectives.gpu.all_reduce import obstacles
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
    parser.add_argument("--seconds", type=float, help="after which a route ends")
    parser.add_argument("--json", type=Path, help="what each route came to")
    arguments = parser.parse_args()
    strategy = mpistrat.MultiWorkerMirroredStrategy(device="cuda")
    topology, device = strategy.extended.engine.topology, strategy.extended.engine.device
    lists = [[cupy.ones(length, np.float32)] for length in LENGTHS]
    lists.append([each for (each,) in lists])
    grew, found = 0, {}

    def tell(route: str, outcome: dict[str, Any], *lines: str) -> None:
        found[route] = outcome
        if topology.rank == 0:
            print("\n".join(lines), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(found, indent=1) + "\n")

    for route, text in obstacles(topology, device).items():
        if text:
            tell(route, {"why": text}, f"{route}: {text}")
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
        times, until = 0, time.monotonic() + (arguments.seconds or math.inf)
        while times < arguments.times and (times % 100 or topology.all_true(time.monotonic() < until)):
            once(times)
            times += 1
        topology.barrier()
        more = [after - each for after, each in zip(used(), before, strict=True)]
        topology.barrier()
        told = topology.all_gather_object(more)
        lines = [
            f"{route}, {times} times, rank {rank}: {gpu / 2**20:+.1f} MiB of the GPU, "
            f"{host / 2**20:+.1f} MiB of the host"
            for rank, (gpu, host) in enumerate(told)
        ]
        too_much = any(gpu > DEVICE_BYTES or host > HOST_BYTES for gpu, host in told)
        grew |= too_much
        tell(route, {"times": times, "grew": too_much, "bytes of GPU and host": told}, *lines)
    return int(grew)


if __name__ == "__main__":
    sys.exit(main())
