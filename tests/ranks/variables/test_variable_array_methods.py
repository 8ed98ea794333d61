"""The methods of NumPy arrays on variables, and how variables and strategies show themselves."""

import numpy as np
import pytest

import mpistrat
from mpistrat import VariableAggregation, VariableSynchronization

CALLS = {
    "sum": [(), (0,)],
    "mean": [(), (1,)],
    "min": [()],
    "max": [(0,)],
    "std": [()],
    "var": [(1,)],
    "prod": [()],
    "any": [()],
    "all": [(1,)],
    "argmax": [()],
    "argmin": [(1,)],
    "argsort": [(1,)],
    "astype": [("float32",)],
    "clip": [(1, 3)],
    "conj": [()],
    "copy": [()],
    "cumsum": [(1,)],
    "cumprod": [(0,)],
    "diagonal": [()],
    "dot": [(np.ones(3),)],
    "flatten": [()],
    "item": [(2,)],
    "nonzero": [()],
    "ravel": [()],
    "repeat": [(2,)],
    "reshape": [(3, 2), ((6,),)],
    "round": [(1,)],
    "squeeze": [()],
    "swapaxes": [(0, 1)],
    "take": [([1, 0], 1)],
    "tobytes": [()],
    "tolist": [()],
    "trace": [()],
    "transpose": [(), (1, 0)],
}
VALUE = np.array([[3.25, 0.0, 2.5], [1.0, -4.0, 2.0]])


def variables(strategy):
    with strategy.scope():
        yield mpistrat.Variable(VALUE, name="v")
        yield mpistrat.Variable(
            VALUE, synchronization=VariableSynchronization.ON_READ, aggregation=VariableAggregation.ONLY_FIRST_REPLICA
        )
    yield mpistrat.Variable(VALUE)


def test_methods_that_read(strategy):
    assert set(CALLS) == set(mpistrat.values.array_like.READING)
    for variable in variables(strategy):
        for name, calls in CALLS.items():
            for arguments in calls:
                np.testing.assert_array_equal(
                    getattr(variable, name)(*arguments), getattr(VALUE, name)(*arguments), strict=True
                )
        assert (variable.nbytes, variable.itemsize) == (48, 8)
        assert variable.T.tolist() == VALUE.T.tolist()
        assert np.sum(variable) == VALUE.sum()
        assert np.mean(variable, axis=0).tolist() == VALUE.mean(0).tolist()
        assert strategy.run(lambda v=variable: v.sum(axis=1).tolist()) == VALUE.sum(1).tolist()


def test_a_result_may_go_to_a_variable(strategy):
    with strategy.scope():
        v, total = mpistrat.Variable(VALUE), mpistrat.Variable(np.zeros(3))
    out = np.zeros(3)
    assert v.sum(axis=0, out=out) is out
    assert np.sum(v, axis=0, out=total) is total
    assert out.tolist() == total.numpy().tolist() == VALUE.sum(0).tolist()


def test_what_is_missing_says_what_to_use(strategy):
    with strategy.scope():
        v = mpistrat.Variable(VALUE)
    for name, remedy in (
        ("fill", "v.assign(np.full_like"),
        ("sort", "np.sort"),
        ("partition", "np.partition"),
        ("put", "v[indices]"),
        ("resize", "np.resize"),
    ):
        with pytest.raises(NotImplementedError) as caught:
            getattr(v, name)(0)
        assert remedy in str(caught.value)
    with pytest.raises(AttributeError, match="'MirroredVariable' object has no attribute 'backward'"):
        v.backward()


def test_reading_returns_views_that_cannot_be_written(strategy):
    with strategy.scope():
        v = mpistrat.Variable(VALUE)
    with pytest.raises(ValueError, match="read-only"):
        v.reshape(-1)[0] = 1.0


def test_tables_in_notebooks(strategy):
    with strategy.scope():
        v = mpistrat.Variable(VALUE, name="<w>")
    shown = v._repr_html_()
    assert "&lt;w&gt;" in shown
    assert "ON_WRITE" in shown
    assert "(2, 3)" in shown
    replicas = strategy.num_replicas_in_sync
    assert f"replicas={replicas} " in repr(strategy)
    assert repr(strategy).startswith("<MultiWorkerMirroredStrategy ")
    assert f">{replicas}</td>" in strategy._repr_html_()
    with strategy.scope():
        metric = mpistrat.metrics.Mean("<loss>")
    strategy.run(lambda: metric.update_state(3.5))
    if strategy.is_chief:  # alone: a table does not communicate
        shown = metric._repr_html_()
    assert not strategy.is_chief or ("&lt;loss&gt;" in shown and ("3.5" in shown) == (replicas == 1))
