"""Common parts of the measurements of all-reduce: bounds, networks, charts, arrays on GPUs."""
