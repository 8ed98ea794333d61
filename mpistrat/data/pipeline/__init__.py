"""The transforms of a dataset, and reading the elements that they make."""
