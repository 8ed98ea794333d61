"""Measure the time of calls of the library beyond the MPI call inside: ``python overhead.py -n 2``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mpistrat.bench import under_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from reporting import LIBRARY, Report, repeated

if TYPE_CHECKING:
    import numpy as np

FLOATS = 16  # length of the single array
ARRAYS = 200
LENGTHS = (16, 256, 4096)  # floats per array of a list


def measure(arguments: argparse.Namespace) -> int:
    """Measure with these arguments, and return the exit status."""
    import numpy as np
    import overhead_by_hand as by_hand
    from mpi4py import MPI

    import mpistrat
    from mpistrat.bench.tune import all_reduces, interleaved

    comm = MPI.COMM_WORLD.Dup()
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    report = Report("overhead", comm.size)

    def compare(
        case: str, nbytes: int, ways: Mapping[str, Callable[[int], object]], inner: int = arguments.inner
    ) -> None:
        report.add_medians(case, nbytes, interleaved(comm, ways, arguments.repetitions, inner))

    one = np.ones(FLOATS, np.float32)
    with strategy.scope():
        variable = mpistrat.Variable(one, aggregation=mpistrat.VariableAggregation.SUM)

    def empty() -> None:
        pass

    def raw(array: np.ndarray) -> Callable[[int], None]:
        """Return repeated calls of MPI's own all-reduce into existing memory."""
        return repeated(partial(comm.Allreduce, array, np.empty_like(array)))

    def raw_and_add(k: int) -> None:
        total, kept = np.empty_like(one), np.zeros_like(one)
        for _ in range(k):
            comm.Allreduce(one, total)
            np.add(kept, total, out=kept)

    compare("run", 0, {LIBRARY: repeated(partial(strategy.run, empty)), "plain call": repeated(empty)})
    reduce = repeated(partial(strategy.reduce, "SUM", one, axis=None))
    compare("reduce", one.nbytes, {LIBRARY: reduce, "Allreduce": raw(one)})
    for length in LENGTHS:
        many = [np.ones(length, np.float32) for _ in range(ARRAYS)]
        compare(
            f"all_reduce of {ARRAYS} x {length} floats",
            ARRAYS * length * 4,
            {
                LIBRARY: all_reduces(strategy, many, []),
                "Allreduce of as many bytes": raw(np.concatenate(many)),
                "by hand": by_hand.all_reduce_list(comm, many),
                "by hand, same buffer": by_hand.all_reduce_list_in_place(comm, many),
            },
            inner=max(1, arguments.inner // 10),
        )
    assign_add = repeated(partial(variable.assign_add, one))
    in_replica = {LIBRARY: lambda k: strategy.run(assign_add, (k,)), "Allreduce": raw_and_add}
    compare("assign_add", one.nbytes, in_replica)
    if comm.rank == 0:
        report.show(arguments.json)
    return 0


if __name__ == "__main__":
    parser = under_ranks.parser(__doc__, repetitions=30)
    under_ranks.count(parser, "--inner", 500, "calls per measurement")
    sys.exit(under_ranks.run(parser, sys.argv[1:], [__file__], measure))
