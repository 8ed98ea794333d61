"""One training step of a perceptron, with the library and written by hand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mpistrat.bench import launch
from mpistrat.bench.report import LIBRARY, Report

if TYPE_CHECKING:
    import numpy as np

PIECES = 2 << 20
ROWS = 128
CHECKED_STEPS = 5


def main(argv: list[str]) -> int | None:
    """Run the subject with these arguments."""
    parser = launch.parser("step", __doc__ or "", repetitions=50)
    parser.add_argument("--momentum", type=float, default=0.0, help="of the optimizer (%(default)s)")
    arguments = parser.parse_args(argv)
    status = launch.launched("step", arguments, argv)
    return _measure(arguments) if status is None else status


def _measure(arguments: argparse.Namespace) -> int:
    # Here, since these load the BLAS, whose number of threads is set by now.
    from mpi4py import MPI

    from mpistrat.bench.perceptron import Perceptron, initial_parameters, random_batch
    from mpistrat.bench.step_by_hand import StepByHand
    from mpistrat.bench.step_with_library import StepWithLibrary
    from mpistrat.bench.timing import interleaved, median

    comm = MPI.COMM_WORLD.Dup()
    initial, momentum = initial_parameters(), arguments.momentum

    def by_hand(pieces: int | None) -> StepByHand:
        return StepByHand(comm, lambda gradients: Perceptron(ROWS, gradients), initial, momentum, pieces)

    programs: dict[str, StepWithLibrary | StepByHand] = {
        LIBRARY: StepWithLibrary(ROWS, momentum, buffers=True),
        f"{LIBRARY}, plain arrays": StepWithLibrary(ROWS, momentum),
        "by hand": by_hand(None),
        "by hand, 2 MiB pieces": by_hand(PIECES),
    }
    batches = [random_batch(comm.size * i + comm.rank, ROWS) for i in range(CHECKED_STEPS)]
    for batch in batches:
        for program in programs.values():
            program.step(*batch)
    fault = difference({way: program.parameters for way, program in programs.items()})
    faults = [f"rank {rank}: {text}" for rank, text in enumerate(comm.allgather(fault)) if text]
    if faults:
        if comm.rank == 0:
            print("\n".join(faults), file=sys.stderr)
        return 1

    ways = {way: partial(_steps, program, batches[0]) for way, program in programs.items()}
    seconds = interleaved(comm, ways, arguments.repetitions)
    if comm.rank == 0:
        report = Report("step", comm.size)
        for way, samples in seconds.items():
            case = f"sgd, momentum {momentum:g}" if momentum else "sgd"
            report.add(case, way, sum(value.nbytes for value in initial), median(samples))
        print(report.table())
        if arguments.json:
            report.write_json(arguments.json)
    return 0


def _steps(program: Any, batch: tuple[np.ndarray, np.ndarray], k: int) -> None:
    for _ in range(k):
        program.step(*batch)


def difference(parameters: Mapping[str, Sequence[np.ndarray]]) -> str | None:
    """What is not equal between the programs, up to rounding; None if all is.

    Examples
    --------
    >>> import numpy as np
    >>> difference({"one": [np.ones(2)], "other": [np.ones(2)]})
    >>> difference({"one": [np.ones(2)], "other": [np.zeros(2)]})
    'the programs differ: parameter 0 of other by up to 1 from that of one'
    """
    import numpy as np

    (first, expected), *others = parameters.items()
    for way, values in others:
        for i, (want, got) in enumerate(zip(expected, values, strict=True)):
            if not np.allclose(got, want, rtol=1e-4, atol=1e-5):
                most = np.abs(np.subtract(got, want)).max()
                return f"the programs differ: parameter {i} of {way} by up to {most:.3g} from that of {first}"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
