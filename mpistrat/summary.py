"""Summaries for TensorBoard, by the names of ``tf.summary``: `mpistrat.training.summary`."""

from mpistrat.training.summary import *  # noqa: F403 - the list of names is there
from mpistrat.training.summary import __all__  # noqa: F401
