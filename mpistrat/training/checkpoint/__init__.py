"""Saving variables to a file, and loading them."""

from mpistrat.training.checkpoint.pending_save import PendingSave
from mpistrat.training.checkpoint.variables import load, save, save_async

__all__ = ["PendingSave", "load", "save", "save_async"]
