"""Measure one training step of a perceptron."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mpistrat.bench import under_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from reporting import LIBRARY, Report, any_fault

if TYPE_CHECKING:
    import numpy as np

ROWS = 128
CHECKED_STEPS = 5
PIECES = 2 << 20  # bytes


class TrainingStep(Protocol):
    """A program that does training steps. Its parameters are compared with those of the other programs."""

    @property
    def parameters(self) -> list[np.ndarray]:
        """The current parameters."""
        ...

    def step(self, images: np.ndarray, labels: np.ndarray) -> float:
        """Do one step. Return this rank's part of the loss."""
        ...


def measure(arguments: argparse.Namespace) -> int:
    """Measure with these arguments, and return the exit status."""
    # Imported here: these load the BLAS, which reads its number of threads from the environment set before.
    from mpi4py import MPI
    from step_by_hand import StepByHand
    from step_perceptron import Perceptron, initial_parameters, random_batch
    from step_with_library import StepWithLibrary

    from mpistrat.bench.tune import interleaved

    comm = MPI.COMM_WORLD.Dup()
    initial, momentum = initial_parameters(), arguments.momentum

    def by_hand(pieces: int | None) -> TrainingStep:
        return StepByHand(comm, lambda gradients: Perceptron(ROWS, gradients), initial, momentum, pieces)

    programs: dict[str, TrainingStep] = {
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
    if any_fault(comm, [fault] if fault else []):
        return 1

    ways = {way: partial(_steps, program, batches[0]) for way, program in programs.items()}
    seconds = interleaved(comm, ways, arguments.repetitions)
    if comm.rank == 0:
        report = Report("step", comm.size)
        case = f"sgd, momentum {momentum:g}" if momentum else "sgd"
        report.add_medians(case, sum(value.nbytes for value in initial), seconds)
        report.show(arguments.json)
    return 0


def _steps(program: Any, batch: tuple[np.ndarray, np.ndarray], k: int) -> None:
    for _ in range(k):
        program.step(*batch)


def difference(parameters: Mapping[str, Sequence[np.ndarray]]) -> str | None:
    """Return the first difference of parameters between programs beyond rounding, or None.

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
    parser = under_ranks.parser(__doc__, repetitions=50)
    parser.add_argument("--momentum", type=float, default=0.0, help="momentum of the optimizer (%(default)s)")
    sys.exit(under_ranks.run(parser, sys.argv[1:], [__file__], measure))
