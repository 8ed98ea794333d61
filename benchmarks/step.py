"""Compare `mpistrat bench step` with the same step in NumPy and mpi4py."""

import sys

from mpistrat.bench import step

PIECES = 2 << 20


def rivals(comm, initial, momentum):
    """Return the programs by hand: with one call for all gradients, and with one call per 2 MiB."""
    from step_by_hand import StepByHand

    from mpistrat.bench.programs.perceptron import Perceptron

    def by_hand(pieces):
        return StepByHand(comm, lambda gradients: Perceptron(step.ROWS, gradients), initial, momentum, pieces)

    return {"by hand": by_hand(None), "by hand, 2 MiB pieces": by_hand(PIECES)}


if __name__ == "__main__":
    sys.exit(step.main(sys.argv[1:], [__file__], rivals))
