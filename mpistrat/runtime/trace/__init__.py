"""The trace of a rank: when each collective, and each phase of it, began and ended, in a file."""
