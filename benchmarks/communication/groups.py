"""Measure training steps of groups that exchange seldom, or send less, against an all-reduce in each step."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mpistrat.bench.measuring import under_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from reporting import LIBRARY, Report

STEPS = 8


def measure(arguments: argparse.Namespace) -> int:
    """Measure in this process, one of the ranks, and return the exit status."""
    import numpy as np
    from mpi4py import MPI
    from networks import resnet50

    import mpistrat
    from mpistrat.bench.measuring.timing import interleaved, repeated
    from mpistrat.experimental import PowerSGD, TopK

    comm = MPI.COMM_WORLD.Dup()
    gradients = [np.random.default_rng(i).standard_normal(shape, np.float32) for i, shape in enumerate(resnet50())]

    def steps(**options):
        strategy = mpistrat.MultiWorkerMirroredStrategy(comm=comm.Dup(), **options)
        with strategy.scope():
            variables = [mpistrat.Variable(np.zeros_like(each)) for each in gradients]
        optimizer = mpistrat.optimizers.SGD(0.1)

        def run():
            pairs = zip(gradients, variables, strict=True)
            strategy.run(lambda: optimizer.apply_gradients(pairs))

        return lambda: [run() for _ in range(STEPS)]

    report = Report("groups", comm.size)
    baseline = steps()
    for case, options in {
        "weights every 8 steps": {"sync_every": STEPS},
        "PowerSGD, rank 4": {"compression": PowerSGD(4)},
        "top 1 %": {"compression": TopK(0.01)},
    }.items():
        ways = {LIBRARY: repeated(steps(groups="node", **options)), "all-reduce in each step": repeated(baseline)}
        report.add_medians(case, sum(each.nbytes for each in gradients), interleaved(comm, ways, arguments.repetitions))
    if comm.rank == 0:
        report.show(arguments.json)
    return 0


if __name__ == "__main__":
    parser = under_ranks.parser(__doc__, repetitions=3)
    sys.exit(under_ranks.run(parser, sys.argv[1:], [__file__], measure))
