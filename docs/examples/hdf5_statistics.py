"""Mean, standard deviation and histogram of a field that many HDF5 files hold.

    mpistrat run -n 4 docs/examples/hdf5_statistics.py --dataset temperature run-*/output.h5

A program with nothing to learn in it: the files are streamed, each rank reads its own rows, and three
sums say it all. Without files it makes some, to have something to show.
"""

import argparse
from pathlib import Path

import h5py
import numpy as np

import mpistrat

BINS = 20


def make_files(folder, name):
    """Five files of different lengths, with a few values missing."""
    random = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate((70, 301, 12, 128, 55)):
        field = random.normal(280 + number, 10, (rows, 24, 32)).astype(np.float32)
        field[random.random(field.shape) < 0.001] = np.nan
        with h5py.File(folder / f"{number}.h5", "w") as file:
            file[name] = field


def statistics(strategy, dataset):
    """Count, mean, standard deviation, histogram and its edges of all values of all batches that are not NaN.

    The dataset is gone through twice: the second time the mean and the range are known, so that nothing is
    lost to rounding as it would be in ``mean(x * x) - mean(x) ** 2``.
    """

    def first(batch):
        values = batch[~np.isnan(batch)]
        total = values.sum(dtype=np.float64)
        return len(values), total, values.min(initial=np.inf), values.max(initial=-np.inf)

    def second(batch, mean, edges):
        values = batch[~np.isnan(batch)]
        return np.square(values - mean).sum(), np.histogram(values, edges)[0]

    with strategy.scope():  # in which the progress bar is drawn by replica 0 alone
        batches = mpistrat.training.progress(dataset, "mean")
        counts, totals, lows, highs = zip(*(strategy.run(first, (batch,)) for batch in batches), strict=True)

        # What a replica found is its own until the replicas sum it, or gather it.
        count, total = strategy.reduce("SUM", (sum(counts), sum(totals)), axis=None)
        low = strategy.gather(np.array([min(lows)]), axis=0).min()
        high = strategy.gather(np.array([max(highs)]), axis=0).max()
        mean, edges = total / count, np.linspace(low, high, BINS + 1)

        batches = mpistrat.training.progress(dataset, "histogram")
        parts = [strategy.run(second, (batch, mean, edges)) for batch in batches]
        squares, histogram = strategy.reduce("SUM", tuple(map(sum, zip(*parts, strict=True))), axis=None)
    return count, mean, np.sqrt(squares / count), histogram, edges


def check(dataset, count, mean, deviation, histogram, edges):
    """Compare with NumPy on all values at once: a dataset that is not distributed has them all."""
    values = np.concatenate([batch.ravel() for batch in dataset]).astype(np.float64)
    values = values[~np.isnan(values)]
    np.testing.assert_allclose((count, mean, deviation), (len(values), values.mean(), values.std()), 1e-12)
    np.testing.assert_array_equal(histogram, np.histogram(values, edges)[0])
    print("as NumPy says")


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="HDF5 files")
    parser.add_argument("--dataset", default="temperature", help="the field (default: temperature)")
    parser.add_argument("--batch-size", type=int, default=64, help="rows that all ranks read per step")
    parser.add_argument("--check", action="store_true", help="compare with NumPy on all data")
    options = parser.parse_args()

    strategy = mpistrat.MultiWorkerMirroredStrategy()
    files = options.files
    if not files:
        with strategy.chief_first() as first:
            if first:
                make_files(Path("statistics-demo"), options.dataset)
        files = sorted(Path("statistics-demo").glob("*.h5"))

    # The files are of different lengths: each rank reads its own rows of every batch, not its own files.
    divided = mpistrat.data.Options()
    divided.experimental_distribute.auto_shard_policy = mpistrat.data.AutoShardPolicy.DATA
    dataset = mpistrat.data.Dataset.from_hdf5(files, options.dataset).with_options(divided)
    dataset = dataset.batch(options.batch_size)
    result = statistics(strategy, strategy.experimental_distribute_dataset(dataset))

    if strategy.is_chief:
        count, mean, deviation, histogram, edges = result
        print(f"{count} values: mean {mean:.8g}, standard deviation {deviation:.8g}")
        for number, edge in zip(histogram, edges, strict=False):
            print(f"{edge:12.5g}  {number:9d}  {'#' * round(50 * number / max(histogram))}")
        if options.check:
            check(dataset, *result)


if __name__ == "__main__":
    main()
