"""Compare `mpistrat bench overhead` with lists that are summed by hand."""

import sys

from mpistrat.bench import overhead


def rivals(comm, arrays):
    """Return ways to sum a list of arrays."""
    import overhead_by_hand as by_hand

    return {
        "by hand": by_hand.all_reduce_list(comm, arrays),
        "by hand, same buffer": by_hand.all_reduce_list_in_place(comm, arrays),
    }


if __name__ == "__main__":
    sys.exit(overhead.main(sys.argv[1:], [__file__], rivals))
