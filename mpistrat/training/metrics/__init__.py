"""Metrics that each replica counts by itself and that are combined when read."""

from mpistrat.training.metrics.accuracy import (
    Accuracy,
    BinaryAccuracy,
    CategoricalAccuracy,
    SparseCategoricalAccuracy,
    SparseTopKCategoricalAccuracy,
    TopKCategoricalAccuracy,
)
from mpistrat.training.metrics.confusion_matrix import ConfusionMatrix
from mpistrat.training.metrics.mean_and_sum import (
    Mean,
    MeanAbsoluteError,
    MeanSquaredError,
    RootMeanSquaredError,
    Sum,
)
from mpistrat.training.metrics.metric import Metric
from mpistrat.training.metrics.thresholds import AUC, Precision, Recall

__all__ = [
    "AUC",
    "Accuracy",
    "BinaryAccuracy",
    "CategoricalAccuracy",
    "ConfusionMatrix",
    "Mean",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Metric",
    "Precision",
    "Recall",
    "RootMeanSquaredError",
    "SparseCategoricalAccuracy",
    "SparseTopKCategoricalAccuracy",
    "Sum",
    "TopKCategoricalAccuracy",
]
