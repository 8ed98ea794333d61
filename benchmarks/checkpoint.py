"""`mpistrat bench checkpoint` beside h5py by itself."""

import sys

from mpistrat.bench import checkpoint


def rivals():
    """Return what writes and reads arrays with the same guarantees."""
    import checkpoint_h5py_by_hand

    return {"h5py": checkpoint_h5py_by_hand}


if __name__ == "__main__":
    sys.exit(checkpoint.main(sys.argv[1:], [__file__], rivals))
