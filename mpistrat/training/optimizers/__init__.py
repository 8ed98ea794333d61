"""Optimizers, one method per file."""

from mpistrat.training.optimizers.adagrad import Adagrad
from mpistrat.training.optimizers.adam import Adam, AdamW
from mpistrat.training.optimizers.lars import LARS
from mpistrat.training.optimizers.optimizer import Optimizer
from mpistrat.training.optimizers.rmsprop import RMSprop
from mpistrat.training.optimizers.sgd import SGD

__all__ = ["LARS", "SGD", "Adagrad", "Adam", "AdamW", "Optimizer", "RMSprop"]
