"""Precision, recall, areas and confusion matrices, against loops over the examples of all replicas."""

import numpy as np
import pytest

import mpistrat
from mpistrat import metrics


def rows(rank, number):
    """Labels, scores and weights: another number of rows on each rank, sometimes zero."""
    random = np.random.default_rng([rank, number])
    count = (rank * 5 + number * 3) % 11
    return random.random((count, 3)) < 0.4, np.round(random.random((count, 3)), 2), random.random(count)


def everything(strategy):
    each = [rows(rank, number) for rank in range(strategy.num_replicas_in_sync) for number in range(3)]
    return [np.concatenate(parts) for parts in zip(*each, strict=True)]


def counted(strategy, metric, weighted=False, of=lambda labels, scores: (labels, scores)):
    def count(number):
        rank = mpistrat.get_replica_context().replica_id_in_sync_group
        labels, scores, weights = rows(rank, number)
        metric.update_state(*of(labels, scores), weights if weighted else None)

    for number in range(3):
        strategy.run(count, (number,))
    return metric.result()


def ratio(part, whole):
    return part / whole if whole else 0.0


@pytest.mark.parametrize("weighted", [False, True])
def test_precision_and_recall(strategy, weighted):
    labels, scores, weights = everything(strategy)
    weights = (weights if weighted else np.ones(len(labels)))[:, None] * np.ones(3)
    thresholds = [0.7, 0.2, 0.5]
    with strategy.scope():
        precision, recall = metrics.Precision(thresholds), metrics.Recall(thresholds)
    found = counted(strategy, precision, weighted), counted(strategy, recall, weighted)
    for i, threshold in enumerate(thresholds):
        positive = scores > threshold
        right = (weights * (positive & labels)).sum()
        np.testing.assert_allclose(found[0][i], ratio(right, (weights * positive).sum()), rtol=1e-12)
        np.testing.assert_allclose(found[1][i], ratio(right, (weights * labels).sum()), rtol=1e-12)
    precision.reset_state()
    assert precision.result().tolist() == [0, 0, 0]


def test_of_one_class_and_of_the_largest(strategy):
    labels, scores, _ = everything(strategy)
    with strategy.scope():
        made = metrics.Precision(class_id=1), metrics.Recall(top_k=2), metrics.Precision(0.5, top_k=1)
    of_class, largest, both = (counted(strategy, metric) for metric in made)
    positive = scores[:, 1] > 0.5
    assert of_class == ratio((positive & labels[:, 1]).sum(), positive.sum())
    rank = (-scores).argsort(1, kind="stable").argsort(1)
    assert largest == ratio(((rank < 2) & labels).sum(), labels.sum())
    positive = (rank < 1) & (scores > 0.5)
    assert both == ratio((positive & labels).sum(), positive.sum())


def curves(labels, scores, thresholds):
    above = [scores > threshold for threshold in thresholds]
    tp = np.array([(each & labels).sum() for each in above], float)
    fp = np.array([(each & ~labels).sum() for each in above], float)
    return tp, fp, labels.sum() - tp, (~labels).sum() - fp


@pytest.mark.parametrize("method", ["interpolation", "minoring", "majoring"])
def test_areas(strategy, method):
    labels, scores, _ = (each.reshape(-1) for each in everything(strategy))
    thresholds = [-1e-7, *(np.arange(1, 49) / 49), 1 + 1e-7]
    tp, fp, fn, tn = curves(labels, scores, thresholds)
    with strategy.scope():
        made = [metrics.AUC(50, curve, method) for curve in ("ROC", "PR")]
    roc, pr = (counted(strategy, metric) for metric in made)
    height = {"interpolation": np.mean, "minoring": np.min, "majoring": np.max}[method]
    y, x = tp / (tp + fn), fp / (fp + tn)
    assert roc == pytest.approx(sum((x[i] - x[i + 1]) * height([y[i], y[i + 1]]) for i in range(49)), abs=1e-12)
    if method != "interpolation":
        p = np.array([ratio(a, a + b) for a, b in zip(tp, fp, strict=True)])
        assert pr == pytest.approx(sum((y[i] - y[i + 1]) * height([p[i], p[i + 1]]) for i in range(49)), abs=1e-12)
        return
    area = 0.0  # of the curve on which true positives grow linearly with all positives
    for i in range(49):
        start, end = tp[i + 1] + fp[i + 1], tp[i] + fp[i]
        if end > start:
            n = np.linspace(start, end, 20_001)
            n = (n[1:] + n[:-1]) / 2
            slope = (tp[i] - tp[i + 1]) / (end - start)
            # Without positives before it, the precision of a stretch is that of its end.
            precision = (tp[i + 1] + slope * (n - start)) / n if start else np.full_like(n, slope)
            area += (precision * slope).mean() * (end - start) / labels.sum()
    assert pr == pytest.approx(area, abs=1e-6)


def test_an_area_is_that_of_all_pairs(strategy):
    """With a threshold between any two scores, the ROC area is the part of pairs that are in order."""
    labels, scores, _ = (each.reshape(-1) for each in everything(strategy))
    with strategy.scope():
        metric = metrics.AUC(thresholds=np.arange(0.005, 1, 0.01))
    positives, negatives = scores[labels][:, None], scores[~labels]
    pairs = (positives > negatives).mean() + (positives == negatives).mean() / 2
    assert counted(strategy, metric) == pytest.approx(pairs, abs=1e-12)


def test_confusion_matrix(strategy):
    labels, scores, weights = everything(strategy)
    with strategy.scope():
        plain, heavy = metrics.ConfusionMatrix(3), metrics.ConfusionMatrix(3)
    of = lambda labels, scores: (labels.argmax(1), scores.argmax(1))  # noqa: E731
    found = counted(strategy, plain, of=of), counted(strategy, heavy, True, of)
    expected = np.zeros((2, 3, 3))
    for a, b, weight in zip(*of(labels, scores), weights, strict=True):
        expected[0, a, b] += 1
        expected[1, a, b] += weight
    assert found[0].tolist() == expected[0].tolist()
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-12)
    if strategy.num_replicas_in_sync > 1:
        strategy.run(lambda: plain.reset_state())
        assert not plain.result().any()


def test_misuse():
    for make, message in (
        (lambda: metrics.AUC(1), "num_thresholds"),
        (lambda: metrics.AUC(curve="roc"), "curve"),
        (lambda: metrics.AUC(summation_method="mean"), "summation_method"),
        (lambda: metrics.AUC(thresholds=[1.5]), "thresholds"),
        (lambda: metrics.Precision(thresholds=[]), "thresholds"),
        (lambda: metrics.Recall(top_k=0), "top_k"),
        (lambda: metrics.ConfusionMatrix(0), "num_classes"),
        (lambda: metrics.AUC().update_state([1], [1.5]), "in \\[0, 1\\]"),
        (lambda: metrics.AUC().update_state([1], [np.nan]), "in \\[0, 1\\]"),
        (lambda: metrics.AUC().update_state([1], [1.0, 0.0]), "shape"),
        (lambda: metrics.ConfusionMatrix(2).update_state([2], [0]), "from 2 to 2, not from 0 to 1"),
        (lambda: metrics.ConfusionMatrix(2).update_state([0], [0.5]), "must be integers"),
    ):
        with mpistrat.OneDeviceStrategy("cpu:0").scope(), pytest.raises(ValueError, match=message):
            make()
