"""Optimizers by Keras' names, and schedules of their learning rates."""

from mpistrat.optimizers import schedules
from mpistrat.training.optimizers import LARS, SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

__all__ = ["LARS", "SGD", "Adagrad", "Adam", "AdamW", "Optimizer", "RMSprop", "schedules"]
