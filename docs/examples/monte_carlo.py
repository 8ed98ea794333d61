"""Measure the volume of balls in 1 to 12 dimensions with random points.

    mpistrat run -n 4 docs/examples/monte_carlo.py --plot balls.png

The points come in blocks, and each block has a random generator of its own. So the ranks share the blocks in any
way, and the result is the same for any number of ranks.
"""

import argparse
import math

import numpy as np

import mpistrat

DIMENSIONS, BLOCKS, POINTS = range(1, 13), 64, 10_000


def hits(seed, block):
    """Count the points of a block that lie in the ball of each dimension.

    The first d coordinates of a point are a point in d dimensions.
    """
    points = np.random.default_rng((seed, block)).uniform(-1, 1, (POINTS, len(DIMENSIONS)))
    return (np.cumsum(points**2, axis=1) <= 1).sum(axis=0)


def estimate(counts):
    """Return the volume of the ball in each dimension, and its standard error."""
    cube = 2.0 ** np.array(DIMENSIONS)
    inside = counts / (BLOCKS * POINTS)
    return cube * inside, cube * np.sqrt(inside * (1 - inside) / (BLOCKS * POINTS))


def exact(dimension):
    return math.pi ** (dimension / 2) / math.gamma(dimension / 2 + 1)


def plot(volumes, errors, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes, deviation = figure.subplots(1, 2)
    true = np.array([exact(d) for d in DIMENSIONS])
    axes.bar(DIMENSIONS, true, color="0.85", label="exact")
    axes.errorbar(DIMENSIONS, volumes, 2 * errors, fmt=".", label="estimate")
    axes.set(xlabel="dimensions", title="volume of the ball of radius 1")
    axes.legend()
    deviation.axhspan(-2, 2, color="0.92")
    deviation.axhline(0, color="0.6", linewidth=1)
    deviation.plot(DIMENSIONS[1:], (volumes - true)[1:] / errors[1:], "o")
    deviation.set(xlabel="dimensions", title="deviation in standard errors", ylim=(-4, 4))
    figure.savefig(path, dpi=80)


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", metavar="FILE", help="draw the volumes")
    parser.add_argument("--check", action="store_true", help="compare with all blocks on one rank")
    options = parser.parse_args()

    strategy = mpistrat.MultiWorkerMirroredStrategy()
    mine = range(strategy.comm.rank, BLOCKS, strategy.comm.size)
    found = sum((hits(options.seed, block) for block in mine), np.zeros(len(DIMENSIONS), int))
    counts = strategy.reduce("SUM", found, axis=None)  # integers: no rounding

    if strategy.is_chief:
        volumes, errors = estimate(counts)
        for dimension, volume, error in zip(DIMENSIONS, volumes, errors, strict=True):
            print(f"{dimension:2d}  {volume:.5f} +- {error:.5f}  exact {exact(dimension):.5f}")
        if options.check:
            np.testing.assert_array_equal(counts, sum(hits(options.seed, block) for block in range(BLOCKS)))
            print("as NumPy says")
        if options.plot:
            plot(volumes, errors, options.plot)


if __name__ == "__main__":
    main()
