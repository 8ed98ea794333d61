"""Solve the heat equation on a plate whose rows are divided over the ranks.

    mpistrat run -n 4 docs/examples/heat_halos.py --plot heat.png --output heat.h5

Each rank holds a block of rows, and one row of each neighbour: the halo. A step needs only these, so each rank
sends two messages per step. All ranks append their rows to the output file. The result has the same bits for any number
of ranks.
"""

import argparse
import contextlib

import numpy as np

from mpistrat import Mesh, ShardedArray
from mpistrat.data import Writer

ROWS, COLUMNS, STEPS, EVERY = 95, 126, 400, 50
RATE = 0.2  # conductivity * time step / area of a cell; the scheme is stable up to 0.25


def hot_discs():
    """Return the plate at the start: two hot discs. Around the plate it is always 0."""
    y, x = np.mgrid[1 : ROWS + 1, 1 : COLUMNS + 1]
    plate = np.zeros((ROWS, COLUMNS))
    plate[(y - 30) ** 2 + (x - 40) ** 2 < 15**2] = 1.0
    plate[(y - 65) ** 2 + (x - 90) ** 2 < 20**2] = 0.7
    return plate


def advance(block):
    """Do one time step for the cells of a block, but not for those around it."""
    cells = block[1:-1, 1:-1]
    neighbours = block[:-2, 1:-1] + block[2:, 1:-1] + block[1:-1, :-2] + block[1:-1, 2:]
    block[1:-1, 1:-1] = cells + RATE * (neighbours - 4 * cells)


def solve(mesh, start, steps, writer=None):
    """Return the plate after the steps, as parts of the ranks. Append it to a file from time to time."""
    plate = ShardedArray.from_array(start, mesh=mesh, axes=("rows", None))
    halo = plate.halo(1, boundary="constant")
    for step in range(steps):
        if writer is not None and step % EVERY == 0:
            writer.append("temperature", plate, attributes={"rate": RATE})
            writer.append("step", step)
            writer.flush()  # from now on other programs see it
        advance(halo.exchange())  # the rows of this rank, and those next to it
    return plate


def plot(before, after, cuts, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, plate, title in zip(figure.subplots(1, 2), (before, after), (0, STEPS), strict=True):
        image = axes.imshow(plate, cmap="inferno", vmin=0, vmax=1)
        for row in cuts[1:-1]:
            axes.axhline(row - 0.5, color="white", linewidth=0.8, linestyle="--")
        axes.set(title=f"step {title}", xticks=(), yticks=())
    figure.colorbar(image, ax=figure.axes, label="temperature", shrink=0.9)
    figure.savefig(path, dpi=80)


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--plot", metavar="FILE", help="draw the plate before and after")
    parser.add_argument("--check", action="store_true", help="compare with the whole plate on one rank")
    parser.add_argument("--output", metavar="FILE", help=f"append the plate to a file every {EVERY} steps")
    options = parser.parse_args()

    mesh = Mesh(rows=-1)  # all ranks, along the rows
    before = hot_discs()
    output = Writer(options.output, overwrite=True) if options.output else contextlib.nullcontext()
    with output as writer:
        plate = solve(mesh, before, STEPS, writer)
    after = plate.gather()
    if mesh.rank == 0:
        print(f"heat {after.sum():.6f} of {before.sum():.6f}, maximum {after.max():.6f} after {STEPS} steps")
        if options.check:
            whole = np.pad(before, 1)
            for _ in range(STEPS):
                advance(whole)
            np.testing.assert_array_equal(after, whole[1:-1, 1:-1])
            print("as NumPy says")
        if options.plot:
            plot(before, after, plate.layout.cuts[0], options.plot)


if __name__ == "__main__":
    main()
