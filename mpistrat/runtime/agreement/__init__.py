"""One collective of a communicator at a time, and all ranks in the same one."""
