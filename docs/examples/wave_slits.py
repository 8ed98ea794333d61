"""Send a wave through two slits, on a field that is cut along both axes over the ranks.

    mpistrat run -n 4 docs/examples/wave_slits.py --plot wave.png

Each rank holds a rectangle of the field, and the cells around it: the halo. Walls and the wave at the start are made by
each rank for its own rectangle. The result has the same bits for any number of ranks.
"""

import argparse

import numpy as np
from mpi4py import MPI

from mpistrat import Mesh, ShardedArray

SHAPE, STEPS, SHOWN = (180, 240), 300, (0, 150, 300)
WALL, SLITS = slice(90, 94), (slice(66, 76), slice(104, 114))
RATE = 0.4  # (speed * time step / length of a cell)**2; the scheme is stable up to 0.5


def pulse(box, step):
    """Return a part of the wave at a step before it meets the wall: it moves to the right."""
    _, x = np.mgrid[box]
    place = x - 40 - np.sqrt(RATE) * step
    return np.sin(place / 2.5) * np.exp(-((place / 12) ** 2))


def openings(box):
    """Return a part of the field that is 1, but 0 in the wall."""
    y, x = np.mgrid[box]
    in_slit = np.any([(y >= slit.start) & (y < slit.stop) for slit in SLITS], axis=0)
    return np.where((x >= WALL.start) & (x < WALL.stop) & ~in_slit, 0.0, 1.0)


def next_of(block, before, passable):
    """Return the cells of a block one step later."""
    now = block[1:-1, 1:-1]
    laplace = block[:-2, 1:-1] + block[2:, 1:-1] + block[1:-1, :-2] + block[1:-1, 2:] - 4 * now
    return passable * (2 * now - before + RATE * laplace)


def solve(mesh):
    """Return the field, as parts of the ranks, and the whole of it at the steps that are shown."""

    def made(function):
        return ShardedArray.from_callback(SHAPE, function, mesh=mesh, axes=("y", "x"))

    passable, before = made(openings), made(lambda box: pulse(box, -1))
    field, shown = made(lambda box: pulse(box, 0)), []
    halo = field.halo(1, boundary="reflect")
    for step in range(STEPS + 1):
        if step in SHOWN:
            shown.append(field.gather())
        block = halo.exchange()
        before.local[...], halo.inner[...] = halo.inner, next_of(block, before.local, passable.local)
    return field, shown


def plot(field, shown, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 2.9), layout="constrained")
    wall = np.ma.masked_greater(openings(tuple(map(slice, SHAPE))), 0)
    for axes, whole, step in zip(figure.subplots(1, len(shown)), shown, SHOWN, strict=True):
        axes.imshow(whole, cmap="RdBu_r", vmin=-0.4, vmax=0.4)
        axes.imshow(wall, cmap="gray")
        for cut in field.layout.cuts[0][1:-1]:
            axes.axhline(cut - 0.5, color="black", linewidth=0.8, linestyle="--")
        for cut in field.layout.cuts[1][1:-1]:
            axes.axvline(cut - 0.5, color="black", linewidth=0.8, linestyle="--")
        axes.set(title=f"step {step}", xticks=(), yticks=())
    figure.savefig(path, dpi=80)


def check(shown):
    """Compare with the whole field on one rank."""
    box = tuple(map(slice, SHAPE))
    before, field, passable = pulse(box, -1), pulse(box, 0), openings(box)
    for _ in range(STEPS):
        field, before = next_of(np.pad(field, 1, mode="reflect"), before, passable), field
    np.testing.assert_array_equal(shown[-1], field)


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--plot", metavar="FILE", help="draw the field at three steps")
    parser.add_argument("--check", action="store_true", help="compare with the whole field on one rank")
    options = parser.parse_args()

    y, x = MPI.Compute_dims(MPI.COMM_WORLD.size, 2)  # 6 ranks: 3 times 2
    mesh = Mesh(y=y, x=x)
    field, shown = solve(mesh)
    if mesh.rank == 0:
        behind = np.abs(shown[-1][:, WALL.stop :])
        print(f"behind the slits: highest {behind.max():.6f}, mean {behind.mean():.6f} after {STEPS} steps")
        if options.check:
            check(shown)
            print("as NumPy says")
        if options.plot:
            plot(field, shown, options.plot)


if __name__ == "__main__":
    main()
