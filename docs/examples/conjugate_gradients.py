"""Solve a large linear system whose rows are divided over the ranks, by conjugate gradients.

    mpistrat run -n 4 docs/examples/conjugate_gradients.py --plot potential.png

The system is the Poisson equation on a grid, and no matrix is stored. An iteration needs the halos for the product
with the matrix, and two sums over all ranks.
"""

import argparse

import numpy as np
from mpi4py import MPI

import mpistrat

GRID, TOLERANCE = 40, 1e-10


def charges():
    """Return the right side: a positive and a negative charge on the grid."""
    density = np.zeros((GRID, GRID))
    density[12, 16], density[28, 27] = 1.0, -1.0
    return density


def laplace(x, above, below):
    """Return the product of the matrix with rows of the grid, whose neighbours are `above` and `below`."""
    padded = np.pad(np.concatenate([above, x, below]), ((0, 0), (1, 1)))
    return 4 * x - padded[:-2, 1:-1] - padded[2:, 1:-1] - padded[1:-1, :-2] - padded[1:-1, 2:]


def solve(strategy, right):
    """Return the solution on every rank, and the norm of the residual after each iteration."""
    comm = strategy.comm
    up = comm.rank - 1 if comm.rank > 0 else MPI.PROC_NULL  # PROC_NULL: the halo stays 0 at the edges
    down = comm.rank + 1 if comm.rank < comm.size - 1 else MPI.PROC_NULL
    above, below = np.zeros((2, 1, right.shape[1]))

    def product(x):
        comm.Sendrecv(x[0], dest=up, recvbuf=below, source=down)
        comm.Sendrecv(x[-1], dest=down, recvbuf=above, source=up)
        return laplace(x, above, below)

    def dot(a, b):
        return strategy.reduce("SUM", np.vdot(a, b), axis=None)

    residual = np.array_split(right, comm.size)[comm.rank].copy()
    x, direction, squared = np.zeros_like(residual), residual.copy(), dot(residual, residual)
    norms = [np.sqrt(squared)]
    while norms[-1] > TOLERANCE * norms[0]:  # the same number on every rank: all of them stop together
        image = product(direction)
        step = squared / dot(direction, image)
        x += step * direction
        residual -= step * image
        squared, before = dot(residual, residual), squared
        direction = residual + squared / before * direction
        norms.append(np.sqrt(squared))
    return strategy.gather(x, axis=0), norms


def check(right, solution):
    """Compare with the solution by the whole matrix."""
    second = 2 * np.eye(GRID) - np.eye(GRID, k=1) - np.eye(GRID, k=-1)
    matrix = np.kron(second, np.eye(GRID)) + np.kron(np.eye(GRID), second)
    serial = np.linalg.solve(matrix, right.ravel()).reshape(right.shape)
    np.testing.assert_allclose(solution, serial, atol=1e-9 * abs(serial).max())
    print("as NumPy says")


def plot(solution, norms, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes, curve = figure.subplots(1, 2)
    image = axes.contourf(solution, np.linspace(-0.3, 0.3, 21), cmap="RdBu_r", extend="both")
    axes.set(title="potential", aspect="equal", xticks=(), yticks=())
    figure.colorbar(image, ax=axes, ticks=np.linspace(-0.3, 0.3, 7))
    curve.semilogy(norms)
    curve.set(xlabel="iteration", title="norm of the residual")
    figure.savefig(path, dpi=80)


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--plot", metavar="FILE", help="draw the potential and the residual")
    parser.add_argument("--check", action="store_true", help="compare with numpy.linalg.solve")
    options = parser.parse_args()

    strategy = mpistrat.MultiWorkerMirroredStrategy()
    right = charges()
    solution, norms = solve(strategy, right)
    if strategy.is_chief:
        print(f"{solution.size} unknowns, {len(norms) - 1} iterations, maximum {solution.max():.9f}")
        if options.check:
            check(right, solution)
        if options.plot:
            plot(solution, norms, options.plot)


if __name__ == "__main__":
    main()
