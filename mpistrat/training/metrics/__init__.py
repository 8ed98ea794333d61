"""Metrics that each replica counts by itself and that are combined when read."""

from mpistrat.training.metrics.classes import (
    Accuracy,
    BinaryAccuracy,
    BinaryCrossentropy,
    CategoricalAccuracy,
    CategoricalCrossentropy,
    SparseCategoricalAccuracy,
    SparseCategoricalCrossentropy,
    SparseTopKCategoricalAccuracy,
    TopKCategoricalAccuracy,
)
from mpistrat.training.metrics.confusion_matrix import BinaryIoU, ConfusionMatrix, F1Score, FBetaScore, IoU, MeanIoU
from mpistrat.training.metrics.mean_and_sum import (
    Mean,
    MeanAbsoluteError,
    MeanAbsolutePercentageError,
    MeanSquaredError,
    R2Score,
    RootMeanSquaredError,
    Sum,
)
from mpistrat.training.metrics.metric import Metric
from mpistrat.training.metrics.thresholds import AUC, Precision, Recall

__all__ = [
    "AUC",
    "Accuracy",
    "BinaryAccuracy",
    "BinaryCrossentropy",
    "BinaryIoU",
    "CategoricalAccuracy",
    "CategoricalCrossentropy",
    "ConfusionMatrix",
    "F1Score",
    "FBetaScore",
    "IoU",
    "Mean",
    "MeanAbsoluteError",
    "MeanAbsolutePercentageError",
    "MeanIoU",
    "MeanSquaredError",
    "Metric",
    "Precision",
    "R2Score",
    "Recall",
    "RootMeanSquaredError",
    "SparseCategoricalAccuracy",
    "SparseCategoricalCrossentropy",
    "SparseTopKCategoricalAccuracy",
    "Sum",
    "TopKCategoricalAccuracy",
]
