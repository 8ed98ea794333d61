"""Compare `mpistrat bench gradients` with programs written by hand."""

import sys

from mpistrat.bench import gradients
from mpistrat.bench.gradients import BUFFERS, PLAIN, GradientsWay


def rivals(comm, shapes):
    """Return ways to sum float32 arrays of these shapes by their case and name in the report."""
    import gradients_one_buffer_by_hand as one_buffer
    import numpy as np
    from gradients_separate_by_hand import Separate

    mine = [np.zeros(shape, np.float32) for shape in shapes]
    separate = Separate(comm, mine)
    flat, parts = one_buffer.views(shapes)
    return {
        (PLAIN, "small ones packed, others in 4 MiB pieces"): GradientsWay(
            mine, separate.times, lambda: separate.totals
        ),
        (BUFFERS, "one buffer, 4 MiB pieces"): GradientsWay(
            parts, one_buffer.in_pieces(comm, flat), lambda: parts
        ),
    }


if __name__ == "__main__":
    sys.exit(gradients.main(sys.argv[1:], [__file__], rivals))
