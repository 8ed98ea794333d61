"""Search the best parameters of a scikit-learn model with the ranks as workers.

    mpistrat run -n 4 docs/examples/grid_search.py --plot grid.png

Rank 0 sends a fit for each pair of parameters and each fold to the rank that is free next. So fits may take times
as different as they like. One rank alone makes the fits itself.
"""

import argparse
import itertools

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from sklearn.svm import SVC

import mpistrat

GRID = {"C": [0.1, 1.0, 10.0, 100.0], "gamma": [1e-4, 3e-4, 1e-3, 3e-3]}
FOLDS = 3
IMAGES, LABELS = (array[:300] for array in load_digits(return_X_y=True))


def score(parameters, fold):
    """Fit on all folds but one; return the accuracy on that one."""
    train, test = list(StratifiedKFold(FOLDS).split(IMAGES, LABELS))[fold]
    return SVC(**parameters).fit(IMAGES[train], LABELS[train]).score(IMAGES[test], LABELS[test])


def search(executor):
    """Return the mean accuracy of each pair of parameters, in the order of scikit-learn."""
    candidates = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]
    pairs = list(itertools.product(candidates, range(FOLDS)))
    scores = executor.map(score, *zip(*pairs, strict=True))
    return candidates, np.fromiter(scores, float).reshape(-1, FOLDS).mean(axis=1)


def check(means):
    """Compare with GridSearchCV."""
    from sklearn.model_selection import GridSearchCV

    serial = GridSearchCV(SVC(), GRID, cv=StratifiedKFold(FOLDS)).fit(IMAGES, LABELS)
    np.testing.assert_allclose(means, serial.cv_results_["mean_test_score"], rtol=1e-12)
    print("as scikit-learn says")


def plot(means, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.8), layout="constrained")
    axes = figure.subplots()
    table = means.reshape(len(GRID["C"]), len(GRID["gamma"]))
    axes.imshow(table, cmap="viridis", aspect="auto")
    for row, column in np.ndindex(table.shape):
        color = "black" if table[row, column] > table.mean() else "white"
        axes.text(column, row, f"{table[row, column]:.3f}", ha="center", va="center", color=color)
    axes.set_xticks(range(len(GRID["gamma"])), GRID["gamma"])
    axes.set_yticks(range(len(GRID["C"])), GRID["C"])
    axes.set(xlabel="gamma", ylabel="C", title=f"mean accuracy over {FOLDS} folds")
    figure.savefig(path, dpi=80)


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--plot", metavar="FILE", help="draw the accuracies")
    parser.add_argument("--check", action="store_true", help="compare with GridSearchCV")
    options = parser.parse_args()

    with mpistrat.coordinator.Executor() as executor:
        if executor is None:  # a worker, whose work is done
            return
        candidates, means = search(executor)
    best = means.argmax()
    print(f"{len(means) * FOLDS} fits, best {candidates[best]} with accuracy {means[best]:.4f}")
    if options.check:
        check(means)
    if options.plot:
        plot(means, options.plot)


if __name__ == "__main__":
    main()
