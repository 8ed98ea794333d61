"""Common parts of the measurements of all-reduce: the library, bounds, arrays on GPUs."""
