"""Measure training steps of groups that exchange seldom, or send less, against an all-reduce in each step."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

from mpistrat.bench import under_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from reporting import LIBRARY, Report, repeated

EVERY = 8  # steps from one exchange of weights to the next
EACH = "all-reduce in each step"
STEPS = 2  # in a measurement of other ways, whose steps are all alike


def measure(arguments: argparse.Namespace) -> int:
    """Measure in this process, one of the ranks, and return the exit status."""
    import numpy as np
    from mpi4py import MPI
    from networks import resnet50

    import mpistrat
    from mpistrat.bench.tune import interleaved
    from mpistrat.experimental import PowerSGD, TopK

    comm = MPI.COMM_WORLD.Dup()
    gradients = [np.random.default_rng(i).standard_normal(shape, np.float32) for i, shape in enumerate(resnet50())]

    def steps(count, **options):
        strategy = mpistrat.MultiWorkerMirroredStrategy(comm=comm.Dup(), **options)
        with strategy.scope():
            variables = [mpistrat.Variable(np.zeros_like(each)) for each in gradients]
        optimizer = mpistrat.optimizers.SGD(0.1)

        def run():
            pairs = zip(gradients, variables, strict=True)
            strategy.run(lambda: optimizer.apply_gradients(pairs))

        return lambda: [run() for _ in range(count)]

    report = Report("groups", comm.size)
    baseline = steps(STEPS)
    for case, count, options in (
        (f"weights every {EVERY} steps", EVERY, {"sync_every": EVERY}),
        ("PowerSGD, rank 4", STEPS, {"compression": PowerSGD(4)}),
        ("top 1 %", STEPS, {"compression": TopK(0.01)}),
    ):
        ways = {LIBRARY: repeated(steps(count, groups="node", **options)), EACH: repeated(baseline)}
        seconds = interleaved(comm, ways, arguments.repetitions, warmup=1)
        of_step = {way: [each / (count if way == LIBRARY else STEPS) for each in of] for way, of in seconds.items()}
        report.add_medians(case, sum(each.nbytes for each in gradients), of_step)
        if comm.rank == 0:
            ours, its = median(of_step[LIBRARY]), median(of_step[EACH])
            print(f"{case}: {ours:.3g} s a step, {ours / its:.2f} of {its:.3g} s", flush=True)
    if comm.rank == 0:
        report.show(arguments.json)
    return 0


if __name__ == "__main__":
    parser = under_ranks.parser(__doc__, repetitions=2)
    sys.exit(under_ranks.run(parser, sys.argv[1:], [__file__], measure))
