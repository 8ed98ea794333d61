"""The public address of the functions that read lists as Slurm writes them."""

from mpistrat.runtime.process.hostlist import expand_counts, expand_hostlist

__all__ = ["expand_counts", "expand_hostlist"]
