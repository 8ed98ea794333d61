"""Sources of rows: Python objects (arrays, sequences, iterables, generators) and files."""
