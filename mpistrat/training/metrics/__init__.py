"""Metrics that each replica counts by itself and that are combined when read."""

from mpistrat.training.metrics.accuracy import (
    Accuracy,
    BinaryAccuracy,
    CategoricalAccuracy,
    SparseCategoricalAccuracy,
)
from mpistrat.training.metrics.confusion_matrix import ConfusionMatrix
from mpistrat.training.metrics.mean import Mean
from mpistrat.training.metrics.mean_squared_error import MeanSquaredError
from mpistrat.training.metrics.metric import Metric
from mpistrat.training.metrics.sum import Sum
from mpistrat.training.metrics.thresholds import AUC, Precision, Recall
from mpistrat.training.metrics.top_k import SparseTopKCategoricalAccuracy, TopKCategoricalAccuracy

__all__ = [
    "AUC",
    "Accuracy",
    "BinaryAccuracy",
    "CategoricalAccuracy",
    "ConfusionMatrix",
    "Mean",
    "MeanSquaredError",
    "Metric",
    "Precision",
    "Recall",
    "SparseCategoricalAccuracy",
    "SparseTopKCategoricalAccuracy",
    "Sum",
    "TopKCategoricalAccuracy",
]
