"""Sources of rows, one kind per file: arrays, sequences, iterables, HDF5 files."""
