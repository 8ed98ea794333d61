"""Compare `mpistrat bench allreduce` with other ways to pass one array to MPI."""

import sys

from mpistrat.bench import allreduce
from mpistrat.bench.allreduce import ArrayWay
from mpistrat.bench.reduction import BUFFERS, PLAIN


def rivals(comm, count):
    """Return ways to sum an array of ``count`` float32 by their case and name in the report."""
    import allreduce_by_hand as by_hand
    import numpy as np

    def way(make):
        send, receive = np.zeros(count, np.float32), np.zeros(count, np.float32)
        return ArrayWay((PLAIN, BUFFERS), make(comm, send, receive), send, lambda: receive)

    own = np.zeros(count, np.float32)
    return {
        (PLAIN, "4 MiB pieces"): way(by_hand.in_pieces),
        (PLAIN, "not blocking"): way(by_hand.not_blocking),
        (BUFFERS, "4 MiB pieces, in place"): ArrayWay((BUFFERS,), by_hand.in_place(comm, own), own, lambda: own),
    }


if __name__ == "__main__":
    sys.exit(allreduce.main(sys.argv[1:], [__file__], rivals))
