"""Rows of HDF5 files: what a file holds, where its rows lie, and readers for each layout."""
