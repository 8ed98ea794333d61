"""How rows are read where a file keeps them: raw, in chunks, or by h5py."""
