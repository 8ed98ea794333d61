"""Rows of HDF5 files: what a file holds, where its rows lie, and how they are read."""
