"""Compare `mpistrat bench checkpoint` with h5py alone."""

import sys

from mpistrat.bench import checkpoint


def rivals():
    """Return programs that write and read arrays with the same guarantees."""
    import checkpoint_h5py_by_hand

    return {"h5py": checkpoint_h5py_by_hand}


if __name__ == "__main__":
    sys.exit(checkpoint.main(sys.argv[1:], [__file__], rivals))
