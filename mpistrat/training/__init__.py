"""What a training script needs around a strategy."""

from mpistrat.training.checkpoint import load, save
from mpistrat.training.progress import progress

__all__ = ["load", "progress", "save"]
