"""The optimizers SGD, Adam and AdamW."""

from mpistrat.training.optimizers import SGD, Adam, AdamW, Optimizer

__all__ = ["SGD", "Adam", "AdamW", "Optimizer"]
