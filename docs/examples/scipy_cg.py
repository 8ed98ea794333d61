"""Solve a sparse system by the conjugate gradients of SciPy; each rank holds some rows of the matrix.

mpistrat run -n 4 docs/examples/scipy_cg.py
"""

import numpy as np
from scipy.sparse import diags_array, eye_array, kron
from scipy.sparse.linalg import LinearOperator, cg

import mpistrat

GRID = 60


def rows_of_matrix(rows):
    """Return rows of the matrix of the Poisson equation. A large program makes them without the rest."""
    line = diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(GRID, GRID))
    return (kron(line, eye_array(GRID)) + kron(eye_array(GRID), line)).tocsr()[rows]


def main():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    n = GRID * GRID
    rows = strategy.scatter(np.arange(n))
    mine = rows_of_matrix(rows)
    right = np.zeros(n)
    right[[1220, 2700]] = 1.0, -1.0
    diagonal = strategy.gather(mine[np.arange(len(rows)), rows], axis=0)

    matrix = LinearOperator((n, n), matvec=lambda x: strategy.gather(mine @ x, axis=0), dtype=float)
    jacobi = LinearOperator((n, n), matvec=lambda r: r / diagonal, dtype=float)

    iterations = 0

    def count(_):
        nonlocal iterations
        iterations += 1

    x, failed = cg(matrix, right, rtol=1e-10, M=jacobi, callback=count)  # the same steps on every rank
    assert failed == 0
    residual = np.linalg.norm(matrix @ x - right)  # collective, as each product with the matrix
    if strategy.is_chief:
        print(f"{x.size} unknowns, {iterations} iterations, residual {residual:.1e}, maximum {x.max():.9f}")


if __name__ == "__main__":
    main()
