"""Compare `mpistrat bench files` with programs that open the files with h5py."""

import sys

from mpistrat.bench import files


def rivals(comm, pattern):
    """Return ways to describe the files of a pattern."""
    import files_by_hand as by_hand

    return {
        "every rank opens all": lambda k: [by_hand.every_rank(pattern) for _ in range(k)],
        "by hand, each its part": lambda k: [by_hand.own_part(comm, pattern) for _ in range(k)],
    }


if __name__ == "__main__":
    sys.exit(files.main(sys.argv[1:], [__file__], rivals))
