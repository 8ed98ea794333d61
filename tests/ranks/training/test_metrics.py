"""Metrics against NumPy on all replicas' values."""

import numpy as np
import pytest

import mpistrat
from mpistrat import metrics


def rows(rank, count, classes=4):
    random = np.random.default_rng([rank, count])
    return random.integers(0, classes, count), random.random((count, classes))


def one_hot(labels, classes=4):
    return np.eye(classes)[labels]


CASES = {
    "accuracy": (metrics.Accuracy, lambda t, p: (t, p.argmax(1)), lambda t, p: t == p.argmax(1)),
    "binary": (metrics.BinaryAccuracy, lambda t, p: (t % 2, p[:, 0]), lambda t, p: (t % 2) == (p[:, 0] > 0.5)),
    "sparse": (metrics.SparseCategoricalAccuracy, lambda t, p: (t, p), lambda t, p: t == p.argmax(1)),
    "sparse, labels as a column": (
        metrics.SparseCategoricalAccuracy,
        lambda t, p: (t[:, None], p),
        lambda t, p: t == p.argmax(1),
    ),
    "categorical": (metrics.CategoricalAccuracy, lambda t, p: (one_hot(t), p), lambda t, p: t == p.argmax(1)),
    "mean squared error": (metrics.MeanSquaredError, lambda t, p: (one_hot(t), p), lambda t, p: (one_hot(t) - p) ** 2),
    "mean absolute error": (metrics.MeanAbsoluteError, lambda t, p: (one_hot(t), p), lambda t, p: abs(one_hot(t) - p)),
    "top 2": (
        lambda: metrics.TopKCategoricalAccuracy(k=2),
        lambda t, p: (one_hot(t), p),
        lambda t, p: [label in np.argsort(row)[-2:] for label, row in zip(t, p, strict=True)],
    ),
    "sparse top 3": (
        lambda: metrics.SparseTopKCategoricalAccuracy(k=3),
        lambda t, p: (t, p),
        lambda t, p: [label in np.argsort(row)[-3:] for label, row in zip(t, p, strict=True)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_exact_over_uneven_replicas(strategy, case):
    make, arguments, values = CASES[case]
    with strategy.scope():
        metric = make()

    def count(number):
        rank = mpistrat.get_replica_context().replica_id_in_sync_group
        metric.update_state(*arguments(*rows(rank, number * rank + 3)))

    for _ in range(2):
        for number in range(3):
            strategy.run(count, (number,))
        everything = [
            values(*rows(rank, number * rank + 3))
            for rank in range(strategy.num_replicas_in_sync)
            for number in range(3)
        ]
        np.testing.assert_allclose(metric.result(), np.concatenate(everything).mean(), rtol=1e-12)
        metric.reset_state()
        assert float(metric.result()) == 0.0


def test_sum_and_mean_with_weights(strategy):
    with strategy.scope():
        total, mean = metrics.Sum(), metrics.Mean()
    replicas = strategy.num_replicas_in_sync

    def count():
        rank = mpistrat.get_replica_context().replica_id_in_sync_group
        values, weights = np.arange(rank + 2.0), np.full(rank + 2, rank + 1)
        total.update_state(values, weights)
        mean.update_state(values, weights)

    strategy.run(count)
    values = np.concatenate([np.arange(rank + 2.0) for rank in range(replicas)])
    weights = np.concatenate([np.full(rank + 2, rank + 1) for rank in range(replicas)])
    assert float(total.result()) == (values * weights).sum()
    np.testing.assert_allclose(mean.result(), np.average(values, weights=weights))
    assert [v.name for v in mean.variables] == ["mean/total", "mean/count"]


def test_a_metric_is_named_after_its_class(strategy):
    """A class of a program has the name of the one that it inherits from, as in Keras."""

    class MyOwnMetric(metrics.Mean):
        pass

    made = [metrics.Mean, metrics.MeanAbsolutePercentageError, metrics.AUC, metrics.Precision, MyOwnMetric]
    with strategy.scope():
        names = [make().name for make in made]
    assert names == ["mean", "mean_absolute_percentage_error", "auc", "precision", "mean"]


def test_counting_does_not_communicate(strategy):
    with strategy.scope():
        metric = metrics.Mean()
    if strategy.is_chief:  # the other replicas are not there: a collective would be a mismatch
        strategy.run(lambda: metric.update_state([1.0, 3.0]))
        assert strategy.run(lambda: float(metric.result())) == 2.0
    assert float(metric.result()) == 2.0
    metric.reset_states()
    assert float(metric.result()) == 0.0


def test_a_replica_that_saw_nothing(strategy):
    with strategy.scope():
        metric = metrics.Mean()
    strategy.run(lambda: metric.update_state(np.ones(3) if strategy.is_chief else np.ones(0)))
    assert float(metric.result()) == 1.0


def test_labels_of_no_class_are_wrong(strategy):
    """As in ``tf.math.in_top_k``: they are not counted from the end, and do not end the job."""
    with strategy.scope():
        metric = metrics.SparseTopKCategoricalAccuracy(k=1)
    strategy.run(lambda: metric.update_state([-1, 2, 3, 2], [[0.1, 0.2, 0.9]] * 4))
    assert float(metric.result()) == 0.5


def test_root_is_that_of_the_mean_over_all_replicas(strategy):
    """Not the mean of the replicas' roots."""
    rank = strategy.comm.rank
    with strategy.scope():
        metric, mean = metrics.RootMeanSquaredError(), metrics.MeanSquaredError()
    for each in (metric, mean):
        strategy.run(lambda each=each: each.update_state(np.zeros(rank + 1), np.full(rank + 1, rank + 2.0)))
    counts = np.arange(strategy.num_replicas_in_sync) + 1
    assert float(metric.result()) == np.sqrt((counts * (counts + 1.0) ** 2).sum() / counts.sum())
    assert float(metric.result()) == np.sqrt(float(mean.result()))


def test_wrong_shapes_raise(strategy):
    with strategy.scope():
        for make, arguments in (
            (metrics.Accuracy, ([1, 2], [1])),
            (metrics.BinaryAccuracy, ([1, 2], [0.5])),
            (metrics.CategoricalAccuracy, (np.ones((2, 3)), np.ones((2, 4)))),
            (metrics.SparseCategoricalAccuracy, ([1, 2], np.ones((3, 4)))),
            (metrics.MeanSquaredError, ([1.0], [1.0, 2.0])),
            (metrics.MeanAbsoluteError, ([1.0], [1.0, 2.0])),
            (metrics.RootMeanSquaredError, ([1.0], [1.0, 2.0])),
            (metrics.Mean, ([1.0, 2.0, 3.0], [1.0, 2.0])),
        ):
            metric = make()
            with pytest.raises(ValueError, match="shape"):
                metric.update_state(*arguments)
        with pytest.raises(ValueError, match="k must be"):
            metrics.TopKCategoricalAccuracy(k=0)


class Own(metrics.Metric):
    def __init__(self, factor, name="own"):
        super().__init__(name=name)
        self.factor, self.total = factor, self.add_weight(name="total", initializer="zeros")

    def update_state(self, x):
        self.total.assign_add(self.factor * float(x))

    def result(self):
        return self.total.read_value()


def test_a_metric_as_programs_write_it_for_keras(strategy):
    with strategy.scope():
        metric = Own(2.0)
        with pytest.raises(ValueError, match="initializer must be 'zeros'"):
            metric.add_weight(name="ones", initializer="ones")
    assert metric.get_config() == {"factor": 2.0, "name": "own"}
    assert strategy.run(lambda: float(metric(3.0))) == 6
    assert float(metric.result()) == 6 * strategy.num_replicas_in_sync
