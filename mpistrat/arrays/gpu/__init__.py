"""GPU memory: kernels, pinned staging buffers, and copies on separate streams."""
