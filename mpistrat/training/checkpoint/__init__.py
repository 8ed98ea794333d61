"""Variables to a file and back."""

from mpistrat.training.checkpoint.pending_save import PendingSave
from mpistrat.training.checkpoint.variables import load, save, save_async

__all__ = ["PendingSave", "load", "save", "save_async"]
