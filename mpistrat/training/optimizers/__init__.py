"""Optimizers: one with a rate for all elements, one with a rate for each, and what they share."""

from mpistrat.training.optimizers.algorithms import LARS, SGD, Adagrad, Adam, AdamW, RMSprop
from mpistrat.training.optimizers.optimizer import Optimizer

__all__ = ["LARS", "SGD", "Adagrad", "Adam", "AdamW", "Optimizer", "RMSprop"]
