"""Optimizers by Keras' names, and schedules of their learning rates."""

from mpistrat import absent
from mpistrat.optimizers import schedules
from mpistrat.training.optimizers import LARS, SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

__all__ = ["LARS", "SGD", "Adagrad", "Adam", "AdamW", "Optimizer", "RMSprop", "schedules"]
__getattr__ = absent.explained(__name__, absent.nothing, absent.OF_OPTIMIZERS)
