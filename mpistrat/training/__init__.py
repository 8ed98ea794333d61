"""Optimizers, metrics, checkpoints, preemption and progress of training programs."""

from mpistrat.training.checkpoint.pending_save import PendingSave
from mpistrat.training.checkpoint.variables import load, save, save_async
from mpistrat.training.progress import progress

__all__ = ["PendingSave", "load", "progress", "save", "save_async"]
