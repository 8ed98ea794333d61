"""Find clusters in HDF5 files: principal components, then k-means.

    mpistrat run -n 4 docs/examples/clusters_hdf5.py --plot clusters.png

Each rank reads its rows of every batch. The sums over the rows of all ranks are a few numbers, which `reduce` adds
up; the rows stay where they are. Without files it makes some in `clusters-demo`.
"""

import argparse
from pathlib import Path

import h5py
import numpy as np

import mpistrat

FEATURES, CLUSTERS, BATCH = 12, 5, 512


def make_files(folder):
    """Write points around five centres to three files of different lengths."""
    random = np.random.default_rng(1)
    centres = random.normal(0, 4, (CLUSTERS, FEATURES))
    folder.mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate((1500, 3001, 812)):
        points = centres[random.integers(CLUSTERS, size=rows)] + random.normal(0, 3, (rows, FEATURES))
        with h5py.File(folder / f"{number}.h5", "w") as file:
            file["points"] = points


def sum_over_rows(strategy, dataset, function):
    """Return the sum of what the function gives for the batches of all ranks."""
    parts = [strategy.run(function, (batch,)) for batch in dataset]
    return strategy.reduce("SUM", tuple(map(sum, zip(*parts, strict=True))), axis=None)


def principal_components(strategy, dataset, number):
    """Return the mean of all rows and the directions in which they vary most."""
    rows, total = sum_over_rows(strategy, dataset, lambda x: (len(x), x.sum(axis=0)))
    mean = total / rows
    (products,) = sum_over_rows(strategy, dataset, lambda x: ((x - mean).T @ (x - mean),))
    variances, directions = np.linalg.eigh(products / rows)  # the smallest variance first
    directions = directions[:, ::-1][:, :number]
    signs = np.sign(directions[abs(directions).argmax(axis=0), range(number)])  # eigh leaves the sign open
    return mean, directions * signs, variances[::-1][:number] / variances.sum()


def nearest(points, centres):
    distances = np.square(points[:, None] - centres).sum(axis=2)
    return distances.argmin(axis=1), distances.min(axis=1).sum()


def far_points(points):
    """Choose centres to start with: the first point, then always the one farthest from those chosen."""
    chosen = points[:1]
    while len(chosen) < CLUSTERS:
        distances = np.square(points[:, None] - chosen).sum(axis=2).min(axis=1)
        chosen = np.concatenate([chosen, points[distances.argmax()][None]])
    return chosen


def kmeans(strategy, dataset, centres, rounds=50):
    """Return the centres, and after each round the sum of the squared distances to them."""

    def assign(points):
        labels, distance = nearest(points, centres)
        members = labels[:, None] == np.arange(CLUSTERS)
        return members.sum(axis=0), members.T @ points, distance

    distances = []
    for _ in range(rounds):
        counts, sums, distance = sum_over_rows(strategy, dataset, assign)
        distances.append(float(distance))
        moved = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], centres)
        if np.allclose(moved, centres, rtol=0, atol=1e-9):
            break
        centres = moved
    return centres, distances


def check(points, start, mean, directions, centres, distances):
    """Compare with NumPy and scikit-learn on all points at once."""
    from sklearn.cluster import KMeans

    _, _, rotated = np.linalg.svd(points - points.mean(axis=0), full_matrices=False)
    cosines = abs((rotated[: directions.shape[1]] * directions.T).sum(axis=1))
    np.testing.assert_allclose(mean, points.mean(axis=0), atol=1e-9)
    np.testing.assert_allclose(cosines, 1, rtol=1e-9)
    serial = KMeans(CLUSTERS, init=start, n_init=1, algorithm="lloyd", tol=0, max_iter=50).fit(points)
    np.testing.assert_allclose(centres, serial.cluster_centers_, atol=1e-6)
    np.testing.assert_allclose(distances[-1], serial.inertia_, rtol=1e-9)
    print("as NumPy and scikit-learn say")


def plot(points, mean, directions, centres, distances, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    scatter, curve = figure.subplots(1, 2, width_ratios=(3, 2))
    x, y = ((points - mean) @ directions).T
    scatter.scatter(x, y, c=nearest(points, centres)[0], s=3, alpha=0.5, cmap="tab10", vmax=9)
    scatter.plot(*((centres - mean) @ directions).T, "k+", markersize=14, markeredgewidth=2)
    scatter.set(xlabel="first principal component", ylabel="second", title="clusters")
    curve.plot(range(1, len(distances) + 1), distances, marker="o")
    curve.set(xlabel="round", title="sum of squared distances")
    figure.savefig(path, dpi=80)


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="HDF5 files with rows of numbers")
    parser.add_argument("--dataset", default="points", help="the rows (default: points)")
    parser.add_argument("--plot", metavar="FILE", help="draw the clusters")
    parser.add_argument("--check", action="store_true", help="compare with NumPy and scikit-learn")
    options = parser.parse_args()

    strategy = mpistrat.MultiWorkerMirroredStrategy()
    files = options.files
    if not files:
        folder = Path("clusters-demo")
        with strategy.chief_first() as first:
            if first:
                make_files(folder)
        files = sorted(folder.glob("*.h5"))

    # The files have different lengths: divide the rows of every batch, not the files.
    divided = mpistrat.data.Options()
    divided.experimental_distribute.auto_shard_policy = mpistrat.data.AutoShardPolicy.DATA
    rows = mpistrat.data.Dataset.from_hdf5(files, options.dataset).with_options(divided).batch(BATCH)
    dataset = strategy.experimental_distribute_dataset(rows)

    start = far_points(next(iter(rows)))  # not distributed: the same batch on every rank
    mean, directions, shares = principal_components(strategy, dataset, 2)
    centres, distances = kmeans(strategy, dataset, start)
    if strategy.is_chief:
        print(f"two components have {shares.sum():.4%} of the variance")
        print(f"{CLUSTERS} clusters, squared distances {distances[-1]:.6g} after {len(distances)} rounds")
        if options.check or options.plot:
            points = np.concatenate(list(rows))
        if options.check:
            check(points, start, mean, directions, centres, distances)
        if options.plot:
            plot(points, mean, directions, centres, distances, options.plot)


if __name__ == "__main__":
    main()
