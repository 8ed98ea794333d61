"""Sweeps that give scikit-learn's and SciPy's own results: ``python joblib_programs.py`` on 3 ranks."""

import threading

import joblib
import numpy as np
from mpi4py import MPI
from scipy import optimize
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score

import mpistrat.integrations.joblib  # noqa: F401 - registers the backend
from mpistrat.coordinator import Executor

X, Y = load_iris(return_X_y=True)
GRID = {"C": [0.01, 1.0], "fit_intercept": [True, False]}


def raised(function):
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("no error was raised")


def search():
    return GridSearchCV(LogisticRegression(max_iter=500), GRID, cv=3).fit(X, Y)


def grid_searches(executor):
    own = search()
    with joblib.parallel_config(backend="mpistrat"):
        before = executor.statistics().ended
        ours = search()
        assert executor.statistics().ended > before
    for name in ("mean_test_score", "std_test_score", "rank_test_score"):
        np.testing.assert_array_equal(ours.cv_results_[name], own.cv_results_[name])
    assert ours.best_params_ == own.best_params_
    np.testing.assert_array_equal(ours.best_estimator_.coef_, own.best_estimator_.coef_)
    models = [LogisticRegression(max_iter=500, C=c, fit_intercept=i) for c in GRID["C"] for i in (True, False)]
    scores = [scores.mean() for scores in executor.map(lambda model: cross_val_score(model, X, Y, cv=3), models)]
    np.testing.assert_allclose(scores, own.cv_results_["mean_test_score"])


def calls_within_calls(executor):
    """Parallel within a call runs on the worker of the call, also if it asks for all cores or for this backend."""

    def ranks(_, backend):
        calls = (joblib.delayed(lambda: (MPI.COMM_WORLD.rank, threading.get_ident()))() for _ in range(5))
        return {*joblib.Parallel(n_jobs=-1, backend=backend)(calls)}

    for backend in (None, "mpistrat"):
        with joblib.parallel_config(backend="mpistrat", executor=executor):
            used = joblib.Parallel()(joblib.delayed(ranks)(i, backend) for i in range(10))
        assert all(len(each) == 1 for each in used)
    assert {rank for each in used for rank, _ in each} <= {1, 2}


def errors_and_generators(executor):
    def root(i):
        return 1 / (i - 7)

    calls = [joblib.delayed(root)(i) for i in range(40)]
    with joblib.parallel_config(backend="mpistrat"):
        assert type(raised(lambda: joblib.Parallel()(calls))) is ZeroDivisionError
        assert joblib.Parallel()(calls[8:]) == [1 / i for i in range(1, 33)]
        assert joblib.Parallel(n_jobs=1)(calls[8:]) == [1 / i for i in range(1, 33)]
        assert {*joblib.Parallel(return_as="generator_unordered")(calls[8:])} == {1 / i for i in range(1, 33)}
        assert type(raised(lambda: joblib.Parallel(n_jobs=0)(calls))) is ValueError


def minima(executor):
    def minimum(workers):
        options = {"rng": 1, "maxiter": 5, "popsize": 4, "updating": "deferred", "polish": False}
        bounds = [(-2.0, 2.0)] * 2
        return optimize.differential_evolution(optimize.rosen, bounds, workers=workers, **options).x

    np.testing.assert_array_equal(minimum(executor.map), minimum(map))


def main():
    error = raised(lambda: joblib.parallel_config(backend="mpistrat"))
    assert "no Executor" in str(error), repr(error)
    with Executor(MPI.COMM_WORLD) as executor:
        if executor is None:
            return
        for check in (grid_searches, calls_within_calls, errors_and_generators, minima):
            check(executor)
    print("all checks passed")


if __name__ == "__main__":
    main()
