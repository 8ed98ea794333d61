"""Measure checkpoints that all ranks write, against pwrite and fsync of the same bytes by the same ranks."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from mpistrat.bench import under_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from reporting import LIBRARY, Report, repeated

TENSORS = 200
PIECE = 16 << 20


def share_of(arrays, comm):
    """Return the flat parts of arrays that are this rank's share of the bytes, by the offset of each in a file."""
    low, high = (sum(each.nbytes for each in arrays) * rank // comm.size for rank in (comm.rank, comm.rank + 1))
    found, before = {}, 0
    for array in arrays:
        first, last = (min(max(end - before, 0), array.nbytes) for end in (low, high))
        if first < last:
            found[before + first] = array.reshape(-1).view("u1")[first:last]
        before += array.nbytes
    return found


def raw_write(share, path, comm):
    """Write this rank's part of some bytes to one file, flush it, and let rank 0 give the file its name."""
    if comm.rank == 0:
        os.close(os.open(f"{path}.tmp", os.O_CREAT | os.O_WRONLY | os.O_TRUNC))
    comm.Barrier()
    file = os.open(f"{path}.tmp", os.O_WRONLY)
    for offset, data in share.items():
        for start in range(0, len(data), PIECE):
            assert os.pwrite(file, data[start : start + PIECE], offset + start) == len(data[start : start + PIECE])
    os.fsync(file)
    os.close(file)
    comm.Barrier()
    if comm.rank == 0:
        os.replace(f"{path}.tmp", path)
        folder = os.open(os.path.dirname(path), os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    comm.Barrier()


def measure(arguments: argparse.Namespace) -> int:
    """Measure in this process, one of the ranks, and return the exit status."""
    import numpy as np
    from mpi4py import MPI

    import mpistrat
    from mpistrat.bench.tune import interleaved
    from mpistrat.training import save, save_async
    from mpistrat.training.checkpoint.by_all import SaveBuffer

    comm = MPI.COMM_WORLD.Dup()
    folder = None
    if comm.rank == 0:
        arguments.data.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix="checkpoint-", dir=arguments.data)
    place = comm.bcast(folder and folder.name)
    length = max(1, arguments.megabytes * 1_000_000 // 4 // TENSORS)
    arrays = [np.random.default_rng(i).standard_normal(length, np.float32) for i in range(TENSORS)]
    nbytes = sum(array.nbytes for array in arrays)
    with mpistrat.MultiWorkerMirroredStrategy(comm=comm).scope():
        variables = [mpistrat.Variable(array, name=str(i)) for i, array in enumerate(arrays)]
    share = share_of([each.own_copy() for each in variables], comm)  # the memory that the library saves
    pieces = {str(offset): part for offset, part in share.items()}
    buffer, pending = SaveBuffer(), []

    def begin():
        pending.append(save_async(variables, f"{place}/library"))

    def wait():
        while pending:
            pending.pop().wait()

    report = Report("checkpoint by all", comm.size)
    cases = {
        "save": {
            LIBRARY: lambda: save(variables, f"{place}/library"),
            "raw pwrite and fsync": lambda: raw_write(share, f"{place}/raw", comm),
        },
        "training stands still": {LIBRARY: begin, "copy of a share": lambda: buffer.copies(pieces)},
    }
    for case, ways in cases.items():
        calls = {name: repeated(way) for name, way in ways.items()}
        seconds = interleaved(comm, calls, arguments.repetitions, warmup=2, before=wait)
        report.add_medians(case, nbytes, seconds)
        wait()
    comm.Barrier()
    if folder is not None:
        folder.cleanup()
        report.show(arguments.json)
    return 0


def main() -> int | None:
    """Run the measurement with the arguments of the command line."""
    parser = under_ranks.parser(__doc__, 11)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder for the files")
    under_ranks.count(parser, "--megabytes", 440, f"size of {TENSORS} float32 arrays")
    return under_ranks.run(parser, sys.argv[1:], [__file__], measure)


if __name__ == "__main__":
    sys.exit(main())
