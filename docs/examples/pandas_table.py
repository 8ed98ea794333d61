"""Read a table from many CSV files with pandas, compute means by group, and train a classifier of scikit-learn.

    mpistrat run -n 4 docs/examples/pandas_table.py

Without files, it first writes some to `stations`. Each rank reads its own files; only sums travel between the ranks.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.linear_model import SGDClassifier
from sklearn.preprocessing import StandardScaler

import mpistrat


def write_tables(folder):
    """Write the measurements of 12 stations as CSV files of different lengths."""
    rng = np.random.default_rng(0)
    for station in range(12):
        n = 500 + 150 * station
        t = rng.normal(10 + station, 5, n)
        h = rng.uniform(20, 100, n)
        rain = h - 2 * t + rng.normal(0, 10, n) > 35
        frame = pd.DataFrame(
            {"station": station, "month": rng.integers(1, 13, n), "temperature": t, "humidity": h, "rain": rain}
        )
        frame.to_csv(folder / f"station-{station:02}.csv", index=False)


def main():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    rank, ranks = strategy.comm.rank, strategy.num_replicas_in_sync
    folder = Path("stations")
    with strategy.chief_first():
        if not folder.exists():
            folder.mkdir()
            write_tables(folder)
    table = pd.concat([pd.read_csv(f) for f in sorted(folder.glob("*.csv"))[rank::ranks]], ignore_index=True)

    # The ranks add frames of the same shape, so each one has all months.
    own = table.assign(count=1, square=table.temperature**2).groupby("month")
    sums = own[["count", "temperature", "square", "rain"]].sum().reindex(range(1, 13), fill_value=0)
    sums = strategy.all_reduce("SUM", sums.astype(float))
    mean = sums.div(sums["count"], axis=0)
    by_month = mean[["temperature", "rain"]].assign(std=(mean.square - mean.temperature**2) ** 0.5)
    if strategy.is_chief:
        print(by_month.round(3))

    x, y = table[["temperature", "humidity"]].to_numpy(), table["rain"].to_numpy()
    scaler = StandardScaler()
    scaler.mean_ = strategy.reduce("MEAN", x, axis=0)
    scaler.scale_ = np.sqrt(strategy.reduce("MEAN", (x - scaler.mean_) ** 2, axis=0))
    model = SGDClassifier(loss="log_loss", random_state=0)
    for _ in range(5):
        model.partial_fit(scaler.transform(x), y, classes=[False, True])
        model.coef_, model.intercept_ = strategy.all_reduce("MEAN", (model.coef_, model.intercept_))
    right = model.predict(scaler.transform(x)) == y
    rows, accuracy = strategy.all_reduce("SUM", len(y)), strategy.reduce("MEAN", right.astype(float), axis=0)
    if strategy.is_chief:
        print(f"accuracy {accuracy:.3f} of {rows} rows")


if __name__ == "__main__":
    main()
