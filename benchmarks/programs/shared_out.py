"""Measure a step of Adam whose state is shared out over the ranks, against one that keeps all of it on each rank."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from mpistrat.bench import under_ranks
from mpistrat.bench.tune import interleaved

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from reporting import LIBRARY, Report, any_fault, repeated

WHOLE = "all on each rank"
MIB = 1 << 20


def measure(arguments: argparse.Namespace) -> int:
    """Measure in this process, one of the ranks, and return the exit status."""
    import numpy as np
    from mpi4py import MPI

    import mpistrat

    comm = MPI.COMM_WORLD.Dup()
    options = mpistrat.experimental.CommunicationOptions(implementation=arguments.implementation)
    strategy = mpistrat.MultiWorkerMirroredStrategy(comm=comm, communication_options=options)
    rng = np.random.default_rng(comm.rank)
    # As in ResNet-50: large kernels, and small vectors between them.
    kernel = max(1, arguments.megabytes * 1_000_000 // 4 // arguments.arrays - 256)
    gradients = [rng.standard_normal(n, np.float32) for _ in range(arguments.arrays) for n in (kernel, 256)]
    made: dict[str, tuple[list[Any], Any]] = {}
    grown: dict[str, int] = {}
    for way in (LIBRARY, WHOLE):
        with strategy.scope():
            variables = [mpistrat.Variable(np.ones_like(gradient)) for gradient in gradients]
        optimizer = mpistrat.optimizers.Adam(
            1e-3, shard_state=way == LIBRARY, global_clipnorm=1.0 if arguments.clip else None
        )
        before = _resident()
        optimizer.build(variables)
        grown[way] = max(comm.allgather(_resident() - before))
        made[way] = variables, optimizer

    def step(way: str) -> None:
        variables, optimizer = made[way]
        strategy.run(lambda: optimizer.apply_gradients(zip(gradients, variables, strict=True)))

    for _ in range(3):
        for way in made:
            step(way)
    pairs = zip(made[LIBRARY][0], made[WHOLE][0], strict=True)
    equal = all(np.asarray(one).tobytes() == np.asarray(other).tobytes() for one, other in pairs)
    close = equal or all(np.allclose(*each, 1e-6, 1e-6) for each in zip(*(of for of, _ in made.values()), strict=True))
    named = arguments.implementation in ("ordered", "exact", "tree")
    if any_fault(comm, [] if (equal if named else close) else ["the weights differ"]):
        return 1
    ways = {way: repeated(lambda way=way: step(way)) for way in made}
    seconds = interleaved(comm, ways, arguments.repetitions)
    if comm.rank == 0:
        report = Report("shared_out", comm.size)
        report.add_medians("adam", sum(each.nbytes for each in gradients), seconds)
        for way, nbytes in grown.items():
            report.add("memory", way, nbytes, 0)
        report.show(arguments.json, f"the weights have the same bits: {equal}")
    return 0


def _resident() -> int:
    """Return the bytes of this process that are in memory."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


if __name__ == "__main__":
    parser = under_ranks.parser(__doc__, repetitions=20)
    under_ranks.count(parser, "--megabytes", 102, "of gradients on each rank")
    under_ranks.count(parser, "--arrays", 50, "large arrays of these gradients; as many small ones are between them")
    parser.add_argument("--implementation", default="AUTO", help="of the sums, such as ordered (%(default)s)")
    parser.add_argument("--clip", action="store_true", help="limit the norm of all gradients")
    sys.exit(under_ranks.run(parser, sys.argv[1:], [__file__], measure))
