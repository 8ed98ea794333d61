"""Sources of rows, one kind per file: arrays, sequences, iterables, generators, files."""
