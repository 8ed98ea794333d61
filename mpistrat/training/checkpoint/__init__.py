"""Saving variables and arrays to a file, and loading them."""

from mpistrat.training.checkpoint.by_all import PendingSave
from mpistrat.training.checkpoint.variables import load, load_arrays, save, save_async

__all__ = ["PendingSave", "load", "load_arrays", "save", "save_async"]
