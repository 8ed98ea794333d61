"""Optimizers, metrics, batch normalization, checkpoints, preemption, progress and history of training programs."""

from mpistrat.training.batch_normalization import BatchNormalization, global_moments
from mpistrat.training.checkpoint.by_all import PendingSave
from mpistrat.training.checkpoint.checkpoint import Checkpoint
from mpistrat.training.checkpoint.kept_checkpoints import CheckpointManager, latest_checkpoint
from mpistrat.training.checkpoint.variables import load, load_arrays, save, save_async
from mpistrat.training.history import History, progress

__all__ = [
    "BatchNormalization",
    "Checkpoint",
    "CheckpointManager",
    "History",
    "PendingSave",
    "global_moments",
    "latest_checkpoint",
    "load",
    "load_arrays",
    "progress",
    "save",
    "save_async",
]
