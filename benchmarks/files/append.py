"""Compare `mpistrat.data.Writer` with h5py on one rank, to which all blocks of a step are gathered.

``mpistrat run -n 4 benchmarks/files/append.py --folder DIR`` runs it.

Each rank has a block of float64, and appends it as its part of a step. "append" is a step without a sync, "flush" what
makes the steps of a run readable and brings them to the disk; for h5py that is ``flush`` and ``fsync``. Runs of the two
take turns. Times are medians over the runs, of the slowest rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import h5py
import numpy as np

import mpistrat
from mpistrat.data import Writer

SIZES = {"4 KiB": (4 << 10, 200), "256 KiB": (256 << 10, 100), "16 MiB": (16 << 20, 8)}


def by_writer(comm, path: Path, block: np.ndarray, steps: int) -> tuple[float, float]:
    """Return the seconds of an append and of the flush."""
    with Writer(path, overwrite=True) as writer:
        writer.append("u", block)
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(steps):
            writer.append("u", block)
        comm.Barrier()
        between = time.perf_counter()
        writer.flush()
        return (between - start) / steps, time.perf_counter() - between


def by_hand(comm, path: Path, block: np.ndarray, steps: int) -> tuple[float, float]:
    """Return the same of a program that gathers the blocks."""
    whole = np.empty((comm.size * len(block), *block.shape[1:])) if comm.rank == 0 else None
    file, data = None, None
    if comm.rank == 0:
        file = h5py.File(path, "w")
        data = file.create_dataset(
            "u", (0, *whole.shape), whole.dtype, maxshape=(None, *whole.shape), chunks=(1, *whole.shape)
        )
    for step in range(-1, steps):
        if step == 0:
            comm.Barrier()
            start = time.perf_counter()
        comm.Gather(block, whole)
        if data is not None:
            data.resize(step + 2, axis=0)
            data[step + 1] = whole
    comm.Barrier()
    between = time.perf_counter()
    if file is not None:
        file.flush()
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        file.close()
    comm.Barrier()
    return (between - start) / steps, time.perf_counter() - between


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(), help="where to write; by default the working directory")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", default=[*SIZES], choices=[*SIZES])
    options = parser.parse_args()
    comm = mpistrat.MultiWorkerMirroredStrategy().comm
    if comm.rank == 0:
        print(f"{comm.size} ranks       append Writer / h5py          flush Writer / h5py")
    for size in options.sizes:
        nbytes, steps = SIZES[size]
        block = np.random.default_rng(comm.rank).random((nbytes // 4096, 512))
        times = {by_writer: [], by_hand: []}
        for _ in range(options.runs):
            for way, found in times.items():
                path = options.folder / f"{way.__name__}.h5"
                found.append([max(comm.allgather(each)) for each in way(comm, path, block, steps)])
                comm.Barrier()
                if comm.rank == 0:
                    path.unlink()
        if comm.rank == 0:
            columns = []
            for which in range(2):
                ours, theirs = (statistics.median(run[which] for run in times[way]) for way in (by_writer, by_hand))
                columns.append(f"{ours * 1e3:9.3f} / {theirs * 1e3:9.3f} ms ({ours / theirs:.2f})")
            print(f"{size:>8}  {'  '.join(columns)}", flush=True)


if __name__ == "__main__":
    main()
