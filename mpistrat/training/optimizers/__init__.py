"""Optimizers: one with a rate for all elements, one with a rate for each, and what they share."""

from mpistrat.training.optimizers.adaptive import Adagrad, Adam, AdamW, RMSprop
from mpistrat.training.optimizers.optimizer import Optimizer
from mpistrat.training.optimizers.sgd import LARS, SGD

__all__ = ["LARS", "SGD", "Adagrad", "Adam", "AdamW", "Optimizer", "RMSprop"]
