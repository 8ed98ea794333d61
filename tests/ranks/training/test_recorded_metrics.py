"""Metrics against the answers of Keras 3.15 on one process, which `recorded` wrote down.

KERAS_BACKEND=jax python -c "import test_recorded_metrics as t; print(t.recorded())"
"""

import numpy as np
import pytest

import mpistrat
from mpistrat import metrics

RANDOM = np.random.default_rng(28)
ROWS, CLASSES = 23, 4
LABELS = RANDOM.integers(0, CLASSES - 1, ROWS)  # there is none of the last class
ODDS = np.round(RANDOM.normal(size=(ROWS, CLASSES)) * 2 + 2 * np.eye(CLASSES)[LABELS], 2)
PROBABILITIES = np.round(np.exp(ODDS) / np.exp(ODDS).sum(1, keepdims=True), 3)
WEIGHTS = np.round(RANDOM.random(ROWS), 2)
ONE_HOT, PREDICTED = np.eye(CLASSES)[LABELS], ODDS.argmax(1)
SEVERAL = (RANDOM.random((ROWS, CLASSES)) < 0.4).astype(float)  # labels, of which a row has several
VALUES = np.round(RANDOM.normal(size=(ROWS, 2)), 2) + [1.0, 10.0]
GUESSES = np.round(VALUES + RANDOM.normal(size=(ROWS, 2)) * [0.3, 1.5], 2)

# The metric with its arguments in Keras, further ones here, labels and predictions.
CASES = {
    "binary crossentropy": ("BinaryCrossentropy", {}, {}, SEVERAL, PROBABILITIES),
    "of logits, smoothed": ("BinaryCrossentropy", {"from_logits": True, "label_smoothing": 0.2}, {}, SEVERAL, ODDS),
    "categorical crossentropy": ("CategoricalCrossentropy", {}, {}, ONE_HOT, PROBABILITIES),
    "categorical of logits, smoothed": (
        "CategoricalCrossentropy",
        {"from_logits": True, "label_smoothing": 0.1},
        {},
        ONE_HOT,
        ODDS,
    ),
    "sparse crossentropy": ("SparseCategoricalCrossentropy", {}, {}, LABELS, PROBABILITIES),
    "sparse of logits": ("SparseCategoricalCrossentropy", {"from_logits": True}, {}, LABELS, ODDS),
    "F1": ("F1Score", {}, {"num_classes": CLASSES}, ONE_HOT, PROBABILITIES),
    "F1, micro": ("F1Score", {"average": "micro"}, {"num_classes": CLASSES}, ONE_HOT, PROBABILITIES),
    "F1, macro": ("F1Score", {"average": "macro", "threshold": 0.3}, {"num_classes": CLASSES}, SEVERAL, PROBABILITIES),
    "F1, weighted": (
        "F1Score",
        {"average": "weighted", "threshold": 0.5},
        {"num_classes": CLASSES},
        SEVERAL,
        PROBABILITIES,
    ),
    "F2": ("FBetaScore", {"beta": 2.0, "threshold": 0.2}, {"num_classes": CLASSES}, SEVERAL, PROBABILITIES),
    "IoU": ("IoU", {"num_classes": CLASSES, "target_class_ids": [0, 2]}, {}, LABELS, PREDICTED),
    "mean IoU": ("MeanIoU", {"num_classes": CLASSES}, {}, LABELS, PREDICTED),
    "mean IoU, one class ignored": (
        "MeanIoU",
        {"num_classes": CLASSES, "ignore_class": 1, "sparse_y_true": False, "sparse_y_pred": False},
        {},
        ONE_HOT,
        ODDS,
    ),
    "binary IoU": ("BinaryIoU", {"threshold": 0.3}, {}, SEVERAL[:, 0], PROBABILITIES[:, 0]),
    "binary IoU of one class": ("BinaryIoU", {"target_class_ids": [1]}, {}, SEVERAL[:, 0], PROBABILITIES[:, 0]),
    "R2": ("R2Score", {}, {"num_outputs": 2}, VALUES, GUESSES),
    "R2, by variance": (
        "R2Score",
        {"class_aggregation": "variance_weighted_average"},
        {"num_outputs": 2},
        VALUES,
        GUESSES,
    ),
    "R2 of each": ("R2Score", {"class_aggregation": None}, {"num_outputs": 2}, VALUES, GUESSES),
    "R2 of one": ("R2Score", {}, {}, VALUES[:, :1], GUESSES[:, :1]),
    "true positives": ("TruePositives", {}, {}, SEVERAL, PROBABILITIES),
    "false positives": ("FalsePositives", {"thresholds": [0.7, 0.2]}, {}, SEVERAL, PROBABILITIES),
    "true negatives": ("TrueNegatives", {"thresholds": [0.7, 0.2]}, {}, SEVERAL, PROBABILITIES),
    "false negatives": ("FalseNegatives", {"thresholds": 0.3}, {}, SEVERAL, PROBABILITIES),
    "percentages": ("MeanAbsolutePercentageError", {}, {}, VALUES, GUESSES),
}

# By case: without weights, and with WEIGHTS.
RECORDED = {
    "binary crossentropy": [1.247435, 1.279094],
    "of logits, smoothed": [1.089639, 1.18381],
    "categorical crossentropy": [1.187676, 1.352037],
    "categorical of logits, smoothed": [1.357947, 1.522392],
    "sparse crossentropy": [1.187676, 1.352037],
    "sparse of logits": [1.185164, 1.34885],
    "F1": [[0.8, 0.545454, 0.666667, 0.0], [0.809876, 0.472303, 0.632153, 0.0]],
    "F1, micro": [0.652174, 0.621124],
    "F1, macro": [0.339869, 0.292086],
    "F1, weighted": [0.306641, 0.353707],
    "F2": [[0.520833, 0.416667, 0.47619, 0.0], [0.485322, 0.49439, 0.222701, 0.0]],
    "IoU": [0.5833330154418945, 0.5713250041007996],
    "mean IoU": [0.38541701436042786, 0.36295199394226074],
    "mean IoU, one class ignored": [0.30303001403808594, 0.2935290038585663],
    "binary IoU": [0.4170039892196655, 0.41769298911094666],
    "binary IoU of one class": [0.3076919913291931, 0.32225900888442993],
    "R2": [0.024606, 0.097514],
    "R2, by variance": [-0.030253, 0.013926],
    "R2 of each": [[0.886189, -0.836976], [0.92878, -0.733751]],
    "R2 of one": [0.886189, 0.92878],
    "true positives": [8.0, 3.61],
    "false positives": [[11.0, 16.0], [4.87, 8.59]],
    "true negatives": [[50.0, 45.0], [25.23, 21.51]],
    "false negatives": [19.0, 7.21],
    "percentages": [3478282.694372, 4031026.505442],
}


def recorded():
    """Ask Keras."""
    import keras

    keras.config.set_floatx("float64")  # in float32 sums of squares lose what R2 is about
    answers = {}
    for case, (name, arguments, _, labels, predictions) in CASES.items():
        for weights in (None, WEIGHTS):
            metric = getattr(keras.metrics, name)(**arguments, dtype="float64")
            metric.update_state(labels, predictions, weights)
            answers.setdefault(case, []).append(np.asarray(metric.result()).round(6).tolist())
    return answers


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["", "weighted"])
@pytest.mark.parametrize("case", CASES)
def test_as_keras_on_all_rows(strategy, case, weights):
    name, arguments, further, labels, predictions = CASES[case]
    with strategy.scope():
        metric = getattr(metrics, name)(**arguments, **further)

    def count(number):
        replica = mpistrat.get_replica_context().replica_id_in_sync_group
        # Parts of another length on each replica, and without rows on some.
        ends = np.linspace(0, 1, strategy.num_replicas_in_sync * 3 + 1) ** 2 * ROWS
        part = slice(*(int(ends[replica * 3 + number + i]) for i in (0, 1)))
        metric.update_state(labels[part], predictions[part], None if weights is None else weights[part])

    for _ in range(2):
        for number in range(3):
            strategy.run(count, (number,))
        np.testing.assert_allclose(metric.result(), RECORDED[case][weights is not None], rtol=1e-6, atol=3e-6)
        metric.reset_state()


@pytest.mark.parametrize("case", CASES)
def test_config_makes_the_metric_again(strategy, case):
    name, arguments, further, labels, predictions = CASES[case]
    with strategy.scope():
        metric = getattr(metrics, name)(**arguments, **further, name="mine")
        config = metric.get_config()
        other = type(metric)(**config)
    assert config == other.get_config()
    assert config["name"] == other.name == "mine"
    assert {**arguments, **further}.items() <= config.items()

    def called(metric):
        return np.asarray(metric(labels, predictions)).tolist()

    first = strategy.run(called, (metric,))
    assert first == strategy.run(called, (other,))
    np.testing.assert_array_equal(metric.result(), other.result())


def test_without_examples(strategy):
    """As one number or one for each class, never NaN."""
    with strategy.scope():
        made = {
            metrics.F1Score(3): [0, 0, 0],
            metrics.F1Score(3, "weighted"): 0,
            metrics.MeanIoU(3): 0,
            metrics.R2Score(): 1,
            metrics.R2Score("variance_weighted_average", num_outputs=2): 1,
        }
    for metric, expected in made.items():
        assert np.asarray(metric.result()).tolist() == expected, metric


def test_scores_of_constant_labels(strategy):
    with strategy.scope():
        metric = metrics.R2Score(None, num_outputs=2)
    strategy.run(lambda: metric.update_state([[3.0, 3.0]] * 4, [[3.0, 3.5]] * 4))
    assert metric.result().tolist() == [1, 0]


def test_mistakes(strategy):
    ones = np.ones((2, 3))
    with strategy.scope():
        for make, match in (
            (lambda: metrics.F1Score("macro"), "num_classes must be a positive int, not 'macro'"),
            (lambda: metrics.F1Score(3, "mean"), "average must be"),
            (lambda: metrics.FBetaScore(3, beta=0), "beta must be above 0"),
            (lambda: metrics.IoU(3, [3]), r"target_class_ids must be from 0 to 2, not \[3\]"),
            (lambda: metrics.R2Score("mean"), "class_aggregation must be"),
            (lambda: metrics.R2Score(num_outputs=0), "num_outputs must be at least 1"),
            (lambda: metrics.BinaryCrossentropy(label_smoothing=2), r"label_smoothing must be in \[0, 1\]"),
        ):
            with pytest.raises(ValueError, match=match):
                make()
        for metric, labels, predictions, match in (
            (metrics.F1Score(2), ones, ones, r"\(2, 3\), not \(examples, num_classes=2\)"),
            (metrics.F1Score(3), ones, ones[:1], "shape"),
            (metrics.MeanIoU(3, ignore_class=9), [0, 9], [0, 1, 2], "shape"),
            (metrics.MeanIoU(3), [0, 9], [0, 1], "classes from 0 to 9"),
            (metrics.R2Score(), ones, ones, r"\(2, 3\), not \(examples, num_outputs=1\)"),
            (metrics.SparseCategoricalCrossentropy(), [0, 3], ones, "classes from 0 to 3, not from 0 to 2"),
            (metrics.CategoricalCrossentropy(), [0, 1], ones, "shape"),
        ):
            with pytest.raises(ValueError, match=match):
                metric.update_state(labels, predictions)
