"""Measure an exchange of halos of a cut array against persistent messages by hand."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mpistrat.bench import under_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from reporting import LIBRARY, Report, any_fault, repeated

BY_HAND = "by hand"


def measure(arguments: argparse.Namespace) -> int:
    """Measure in this process, one of the ranks, and return the exit status."""
    import halos_by_hand
    import numpy as np
    from mpi4py import MPI

    from mpistrat.bench.tune import interleaved
    from mpistrat.experimental import Mesh, ShardedArray

    comm = MPI.COMM_WORLD.Dup()
    report = Report("halos", comm.size)
    for columns in arguments.columns:
        start = np.random.default_rng(0).normal(size=(8 * comm.size, columns))
        halo = ShardedArray.from_array(start, mesh=Mesh(x=-1), axes=("x", None)).halo((1, 0))
        block = np.zeros_like(halo.block)
        block[1:-1] = halo.inner
        by_hand = halos_by_hand.exchange_of(comm, block)
        halo.exchange()
        by_hand()
        if any_fault(comm, [] if (halo.block == block).all() else [f"{columns} columns: the halos differ"]):
            return 1
        ways = {LIBRARY: repeated(halo.exchange), BY_HAND: repeated(by_hand)}
        report.add_medians(f"{columns} columns", 8 * columns, interleaved(comm, ways, arguments.repetitions))
    if comm.rank == 0:
        report.show(arguments.json)
    return 0


if __name__ == "__main__":
    parser = under_ranks.parser(__doc__, repetitions=101)
    parser.add_argument(
        "--columns",
        metavar="N",
        type=under_ranks.positive,
        nargs="+",
        default=[16, 1000, 100_000],
        help="float64 numbers of a border (16 1000 100000)",
    )
    sys.exit(under_ranks.run(parser, sys.argv[1:], [__file__], measure))
