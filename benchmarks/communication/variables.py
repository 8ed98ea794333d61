"""Measure reads and updates of a network's variables on parameter servers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from networks import NETWORKS

from mpistrat.bench import under_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from reporting import LIBRARY, Report, repeated


def measure(arguments: argparse.Namespace) -> int:
    """Measure with these arguments, and return the exit status."""
    import numpy as np
    from mpi4py import MPI

    import mpistrat
    from mpistrat.bench.tune import interleaved

    size, servers = MPI.COMM_WORLD.size, arguments.servers
    jobs = {"chief": 1, "worker": size - 1 - servers, "ps": servers}
    if jobs["worker"] < 1:
        if MPI.COMM_WORLD.rank == 0:
            sys.stderr.write(f"{servers} parameter servers, a chief and a worker are {servers + 2} ranks: -n\n")
        return 1
    resolver = mpistrat.cluster_resolver.MpiClusterResolver(MPI.COMM_WORLD, jobs=jobs)
    if resolver.task_type != "chief":
        mpistrat.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
        return 0
    arrays = [np.ones(shape, np.float32) for shape in NETWORKS[arguments.network]()[:: arguments.part]]
    targets = [each.copy() for each in arrays]
    strategy = mpistrat.ParameterServerStrategy(resolver)
    with strategy.scope():
        variables = [mpistrat.Variable(each) for each in arrays]
    extended = strategy.extended
    pairs = [*zip(variables, arrays, strict=True)]
    ways: dict[tuple[str, str], Callable[[], object]] = {
        ("read", LIBRARY): lambda: extended.batch_read(variables),
        ("read", "read_value of each"): lambda: [each.read_value() for each in variables],
        ("read", "copies in this rank"): lambda: [each.copy() for each in arrays],
        ("read", "into existing arrays"): lambda: [*map(np.copyto, targets, arrays)],
        ("update", LIBRARY): lambda: extended.batch_update([(v, _add, (each,)) for v, each in pairs]),
        ("update", "assign_add of each"): lambda: [v.assign_add(each) for v, each in pairs],
        ("update", "in this rank"): lambda: [*map(np.add, targets, arrays, targets)],
    }
    calls = {name: repeated(way) for name, way in ways.items()}
    seconds = interleaved(MPI.COMM_SELF, calls, arguments.repetitions)
    report = Report("variables", size)
    nbytes = sum(each.nbytes for each in arrays)
    for (case, way), samples in seconds.items():
        report.add(f"{case}, {arguments.network}", way, nbytes, median(samples))
    report.show(arguments.json)
    return 0


def _add(variable: Any, delta: Any) -> None:
    variable.assign_add(delta)


if __name__ == "__main__":
    parser = under_ranks.parser(__doc__, repetitions=10)
    parser.set_defaults(n=4)
    text = "parameter servers, the last ranks; at least 2 ranks are left for chief and worker"
    under_ranks.count(parser, "--servers", 2, text)
    parser.add_argument("--network", choices=list(NETWORKS), default="ResNet-50", help="(%(default)s)")
    under_ranks.count(parser, "--part", 1, "measure only every N-th tensor, for a trial")
    sys.exit(under_ranks.run(parser, sys.argv[1:], [__file__], measure))
