"""Optimizers, one method per file."""

from mpistrat.training.optimizers.adam import Adam
from mpistrat.training.optimizers.adamw import AdamW
from mpistrat.training.optimizers.optimizer import Optimizer
from mpistrat.training.optimizers.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Optimizer"]
