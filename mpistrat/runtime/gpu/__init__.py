"""The memory of GPUs: kernels, pinned staging, copies on a stream of their own."""
