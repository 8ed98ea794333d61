"""Arrays to and from files: how they lie there, files that all ranks write, and HDF5 files in memory."""
