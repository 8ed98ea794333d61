"""Measure several replicas in a rank against one that adds up the same gradients, and the fixed tree against MPI."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpistrat.bench import under_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from reporting import LIBRARY, Report, any_fault, repeated

if TYPE_CHECKING:
    import numpy as np

BY_HAND = "accumulation by hand"


def measure(arguments: argparse.Namespace) -> int:
    """Measure in this process, one of the ranks, and return the exit status."""
    from mpi4py import MPI

    from mpistrat.bench.tune import interleaved

    if arguments.one_core:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[MPI.COMM_WORLD.rank % len(cores)]})
    comm = MPI.COMM_WORLD.Dup()
    report = Report("replicas", comm.size)
    links: list[str] = []
    cases = _reductions(comm, arguments.tree) if arguments.tree else _steps(comm, arguments.each)
    for case, nbytes, ways, faults in cases:
        if any_fault(comm, faults()):
            return 1
        seconds = interleaved(comm, ways, arguments.repetitions)
        report.add_medians(case, nbytes, seconds)
        if arguments.tree:
            links += [_link_line(comm, way, call, nbytes) for way, call in ways.items()]
    if comm.rank == 0:
        report.show(arguments.json, *links)
    return 0


def _link_line(comm: Any, way: str, call: Callable[[int], Any], nbytes: int) -> str:
    """Return how much each node sends for a call. The least of several: other packets count, too."""
    found = []
    for _ in range(5):
        comm.Barrier()
        before = _sent()
        comm.Barrier()
        call(1)
        comm.Barrier()
        found.append((_sent() - before) / nbytes)
        comm.Barrier()
    by_rank = comm.allgather(min(found))
    return (
        f"{way}: the links of nodes carry "
        + ", ".join(f"{each:.2f}" for each in sorted({round(each, 2) for each in by_rank}))
        + " times the array"
    )


def _sent() -> int:
    """Return the bytes that the links of this node have sent, with headers."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split()[-8]) for line in lines if line.split()[0] != "lo:")


Case = tuple[str, int, dict[str, Callable[[int], Any]], Callable[[], list[str]]]


def _steps(comm: Any, each: int) -> Iterator[Case]:
    import numpy as np
    from small_digits import initial_weights, loss_and_gradients, random_digits, scaled

    import mpistrat

    options = mpistrat.experimental.CommunicationOptions(implementation="auto" if each == 1 else "tree")
    strategy = mpistrat.MultiWorkerMirroredStrategy(
        comm=comm, virtual_replicas=each * comm.size, communication_options=options
    )
    replica = mpistrat.get_replica_context
    one = mpistrat.MultiWorkerMirroredStrategy(comm=comm)

    def total() -> list[Any]:
        return [replica().all_reduce("SUM", 1.0) for _ in range(each)]

    yield (
        "nothing",
        0,
        {
            LIBRARY: repeated(lambda: strategy.run(lambda: None)),
            "a loop": repeated(lambda: [one.run(lambda: None) for _ in range(each)]),
        },
        list,
    )
    yield (
        "a number",
        8,
        {
            LIBRARY: repeated(lambda: strategy.run(lambda: replica().all_reduce("SUM", 1.0))),
            "a loop": repeated(lambda: one.run(total)),
        },
        list,
    )
    digits = random_digits()
    images, labels = scaled(digits.images), digits.labels
    for rows in (16, 256):
        parts = [np.arange(i * rows, i * rows + rows) % len(labels) for i in range(each)]
        batches = [(images[part], labels[part]) for part in parts]
        yield _step(f"digits, {rows} rows", strategy, one, initial_weights(), loss_and_gradients, batches)
    rng = np.random.default_rng(0)
    batches = [tuple(rng.random((2, 8, 32, 32, 16), np.float32)) for _ in range(each)]
    kernel = rng.random((3, 3, 16, 16), np.float32)
    yield _step("convolution, 8 rows", strategy, one, [kernel], _convolution, batches)


def _step(
    name: str,
    strategy: Any,
    one: Any,
    initial: Sequence[np.ndarray],
    loss_and_gradients: Callable[..., tuple[float, list[np.ndarray]]],
    batches: Sequence[Any],
) -> Case:
    """Return a step of each replica, and the step of a rank that adds up what its replicas would give."""
    import numpy as np

    import mpistrat

    made = []
    for each in (strategy, one):
        with each.scope():
            made.append(([mpistrat.Variable(value) for value in initial], mpistrat.optimizers.SGD(1e-6)))
    (variables, optimizer), (own, by_hand) = made
    values = mpistrat.values.PerReplica(batches) if len(batches) > 1 else batches[0]

    def step(batch: Any) -> float:
        loss, gradients = loss_and_gradients([np.asarray(each) for each in variables], *batch)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    def accumulated() -> list[float]:
        losses, totals = [], []
        for batch in batches:
            loss, gradients = loss_and_gradients([np.asarray(each) for each in own], *batch)
            losses.append(loss)
            if totals:
                for total, gradient in zip(totals, gradients, strict=True):
                    total += gradient
            else:
                totals = gradients
        by_hand.apply_gradients(zip(totals, own, strict=True))
        return losses

    def faults() -> list[str]:
        losses = strategy.experimental_local_results(strategy.run(step, (values,)))
        expected = one.run(accumulated)
        good = np.allclose(losses, expected) and all(
            np.allclose(a, b, 1e-5) for a, b in zip(variables, own, strict=True)
        )
        return [] if good else [f"{name}: the losses are {losses}, not {expected}, or weights differ"]

    ways = {LIBRARY: repeated(lambda: strategy.run(step, (values,))), BY_HAND: repeated(lambda: one.run(accumulated))}
    return name, sum(each.nbytes for each in initial), ways, faults


def _convolution(
    weights: Sequence[np.ndarray], images: np.ndarray, wanted: np.ndarray
) -> tuple[float, list[np.ndarray]]:
    """Return the squared error of a convolution of 3 x 3 pixels, and its gradient."""
    import numpy as np

    height, width = images.shape[1] - 2, images.shape[2] - 2
    error = -wanted[:, 1:-1, 1:-1]
    for i, j in np.ndindex(3, 3):
        error = error + images[:, i : i + height, j : j + width] @ weights[0][i, j]
    slope = error.reshape(-1, error.shape[-1]) / np.float32(error.size)
    gradient = np.empty_like(weights[0])
    for i, j in np.ndindex(3, 3):
        part = images[:, i : i + height, j : j + width]
        gradient[i, j] = part.reshape(-1, part.shape[-1]).T @ slope
    return float((error * error).sum() / 2), [gradient]


def _reductions(comm: Any, mib: int) -> Iterator[Case]:
    import numpy as np

    import mpistrat

    array = np.full(mib << 18, np.float32(comm.rank + 1))
    expected = comm.size * (comm.size + 1) // 2

    def reduction(implementation: str) -> Callable[[], Any]:
        options = mpistrat.experimental.CommunicationOptions(implementation=implementation)
        strategy = mpistrat.MultiWorkerMirroredStrategy(
            comm=comm, virtual_replicas=comm.size, communication_options=options
        )
        return lambda: strategy.run(lambda: mpistrat.get_replica_context().all_reduce("SUM", array))

    calls = {LIBRARY: reduction("tree"), "mpi": reduction("mpi")}

    def faults() -> list[str]:
        return [name for name, call in calls.items() if not (call().values[0] == expected).all()]

    yield "all-reduce", array.nbytes, {name: repeated(call) for name, call in calls.items()}, faults


if __name__ == "__main__":
    parser = under_ranks.parser(__doc__, repetitions=301)
    under_ranks.count(parser, "--each", 8, "replicas of each rank")
    parser.add_argument("--one-core", action="store_true", help="bind each rank to one core")
    parser.add_argument(
        "--tree", metavar="MIB", type=int, help="all-reduce MIB by tree and by MPI instead, and count bytes"
    )
    sys.exit(under_ranks.run(parser, sys.argv[1:], [__file__], measure))
