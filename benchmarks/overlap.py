"""Compare `mpistrat bench overlap` with MPI requests managed by hand."""

import sys

from mpistrat.bench import overlap


def rivals(comm, network):
    """Return the way by hand, and the arrays that get its totals."""
    import numpy as np
    import overlap_by_hand

    totals = [np.zeros_like(each) for each in network.gradients]
    return {"by hand": (overlap_by_hand.all_reduce_each(comm, network.compute, totals), totals)}


if __name__ == "__main__":
    sys.exit(overlap.main(sys.argv[1:], [__file__], rivals))
