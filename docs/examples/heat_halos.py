"""Solve the heat equation on a plate whose rows are divided over the ranks.

    mpistrat run -n 4 docs/examples/heat_halos.py --plot heat.png --output heat.h5

Each rank holds a block of rows, and one row of each neighbour: the halo. A step needs only these, so each rank
sends two messages per step. All ranks append their rows to the output file. The result has the same bits for any number
of ranks.
"""

import argparse
import contextlib

import numpy as np
from mpi4py import MPI

import mpistrat
from mpistrat.data import Writer

ROWS, COLUMNS, STEPS, EVERY = 97, 128, 400, 50
RATE = 0.2  # conductivity * time step / area of a cell; the scheme is stable up to 0.25


def hot_discs():
    """Return the plate at the start: two hot discs, and edges that stay at 0."""
    y, x = np.mgrid[0:ROWS, 0:COLUMNS]
    plate = np.zeros((ROWS, COLUMNS))
    plate[(y - 30) ** 2 + (x - 40) ** 2 < 15**2] = 1.0
    plate[(y - 65) ** 2 + (x - 90) ** 2 < 20**2] = 0.7
    return plate


def advance(plate):
    """Do one time step for all cells but those at the edges of the array."""
    cells = plate[1:-1, 1:-1]
    neighbours = plate[:-2, 1:-1] + plate[2:, 1:-1] + plate[1:-1, :-2] + plate[1:-1, 2:]
    plate[1:-1, 1:-1] = cells + RATE * (neighbours - 4 * cells)


def exchange_halos(comm, block):
    """Send the first and the last row of this rank to its neighbours, and receive theirs."""
    above = comm.rank - 1 if comm.rank > 0 else MPI.PROC_NULL  # PROC_NULL: no message at the edges
    below = comm.rank + 1 if comm.rank < comm.size - 1 else MPI.PROC_NULL
    comm.Sendrecv(block[1], dest=above, recvbuf=block[-1], source=below)
    comm.Sendrecv(block[-2], dest=below, recvbuf=block[0], source=above)


def solve(strategy, plate, steps, writer=None):
    """Return the plate after the steps, on every rank. Append it to a file from time to time."""
    comm = strategy.comm  # the communicator for messages of your own
    cells = np.array_split(np.arange(1, len(plate) - 1), comm.size)[comm.rank]
    block = plate[cells[0] - 1 : cells[-1] + 2].copy()  # the rows of this rank, and a halo on both sides
    own = block[int(comm.rank > 0) : len(block) - int(comm.rank < comm.size - 1)]  # with the edges of the plate
    for step in range(steps):
        if writer is not None and step % EVERY == 0:
            writer.append("temperature", own, attributes={"rate": RATE})
            writer.append("step", step)
            writer.flush()  # from now on other programs see it
        exchange_halos(comm, block)
        advance(block)
    return strategy.gather(own, axis=0)  # blocks may have different lengths


def plot(before, after, ranks, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, plate, title in zip(figure.subplots(1, 2), (before, after), (0, STEPS), strict=True):
        image = axes.imshow(plate, cmap="inferno", vmin=0, vmax=1)
        for rows in np.array_split(np.arange(1, ROWS - 1), ranks)[1:]:
            axes.axhline(rows[0] - 0.5, color="white", linewidth=0.8, linestyle="--")
        axes.set(title=f"step {title}", xticks=(), yticks=())
    figure.colorbar(image, ax=figure.axes, label="temperature", shrink=0.9)
    figure.savefig(path, dpi=80)


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--plot", metavar="FILE", help="draw the plate before and after")
    parser.add_argument("--check", action="store_true", help="compare with the whole plate on one rank")
    parser.add_argument("--output", metavar="FILE", help=f"append the plate to a file every {EVERY} steps")
    options = parser.parse_args()

    strategy = mpistrat.MultiWorkerMirroredStrategy()
    before = hot_discs()
    output = Writer(options.output, overwrite=True) if options.output else contextlib.nullcontext()
    with output as writer:
        after = solve(strategy, before, STEPS, writer)
    if strategy.is_chief:
        print(f"heat {after.sum():.6f} of {before.sum():.6f}, maximum {after.max():.6f} after {STEPS} steps")
        if options.check:
            whole = before.copy()
            for _ in range(STEPS):
                advance(whole)
            np.testing.assert_array_equal(after, whole)
            print("as NumPy says")
        if options.plot:
            plot(before, after, strategy.num_replicas_in_sync, options.plot)


if __name__ == "__main__":
    main()
