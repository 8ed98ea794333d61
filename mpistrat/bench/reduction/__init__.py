"""What the subjects of all-reduces have in common: bounds, networks, charts, arrays on GPUs."""
