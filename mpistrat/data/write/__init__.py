"""Writing rows to HDF5 files, and dividing HDF5 files into more or fewer files."""
