"""The transforms of a dataset, and the elements that they make."""
