"""Rows to HDF5 files, and HDF5 files to more or fewer."""
