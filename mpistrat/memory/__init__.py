"""The memory that the ranks of a node share, and the buffer pool."""
