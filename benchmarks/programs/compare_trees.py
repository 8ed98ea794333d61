"""Compare small calls and rows of this tree with those of another: ``python compare_trees.py OTHER -n 2``.

OTHER is a folder with a ``mpistrat`` of another version, or a commit of this repository; by default the last release.
Jobs of both trees take turns. A row has the least time of this tree in all rounds, and that divided by the least of the
other: a shared machine has slow minutes, which medians of few rounds take for a difference. It shows, and does not
fail.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
WORSE = 1.05


def least(function: Callable[[], object], calls: int, blocks: int = 30) -> float:
    """Return the seconds of one call, in the fastest of some blocks of calls."""

    def block() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - start) / calls

    return min(block() for _ in range(blocks))


def measure(folder: Path) -> None:
    """Measure with the ``mpistrat`` that Python finds first, and let the chief print the seconds as JSON."""
    import h5py
    import numpy as np

    import mpistrat

    strategy = mpistrat.MultiWorkerMirroredStrategy()
    one, gradients = np.ones(16, np.float32), [np.ones((8, 4)), np.ones(4)] * 3
    with strategy.scope():
        variable = mpistrat.Variable(one, aggregation=mpistrat.VariableAggregation.SUM)
        weights = [mpistrat.Variable(np.zeros_like(each)) for each in gradients]
        optimizer = mpistrat.optimizers.Adam(1e-3)
    with strategy.chief_first():
        for name, chunk in {"small": 1024, "large": 8}.items():
            if not (folder / name).exists():
                with h5py.File(folder / name, "w") as file:
                    rows = (1 << 15, 8) if name == "small" else (512, 1 << 14)
                    file.create_dataset("x", data=np.ones(rows, "f4"), chunks=(chunk, rows[1]))
                    file.create_dataset("y", data=np.arange(rows[0]), chunks=(chunk,))

    def epoch(name: str, batch: int) -> Callable[[], object]:
        rows = mpistrat.data.Dataset.from_hdf5(str(folder / name), ("x", "y")).shuffle(seed=1).batch(batch)
        distributed = strategy.experimental_distribute_dataset(rows)
        return lambda: sum(len(y) for _, y in distributed)

    def inside(function: Callable[[], object]) -> float:
        seconds: list[float] = []
        strategy.run(lambda: seconds.append(least(function, 300)))
        return seconds[0]

    found = {
        "run": least(lambda: strategy.run(int), 1000),
        "reduce of a number": least(lambda: strategy.reduce("SUM", 1.0, axis=None), 300),
        "reduce of an array": least(lambda: strategy.reduce("SUM", one, axis=None), 300),
        "reduce of a list": least(lambda: strategy.reduce("SUM", [one] * 3, axis=None), 300),
        "assign_add": inside(lambda: variable.assign_add(one)),
        "apply_gradients": inside(lambda: optimizer.apply_gradients(zip(gradients, weights, strict=True))),
        "epoch of small rows": least(epoch("small", 64), 1, 7),
        "epoch of large rows": least(epoch("large", 8), 1, 7),
    }
    if strategy.is_chief:
        print(json.dumps(found))


def measured(tree: Path, ranks: int, folder: Path) -> dict[str, float]:
    """Return what `measure` prints in a job of its own, whose ranks import the package of a tree."""
    command = [sys.executable, "-m", "mpistrat", "run", "-n", str(ranks), __file__, "--measure", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    job = subprocess.run(command, env=environment, capture_output=True, timeout=120, text=True)
    if job.returncode:
        raise SystemExit(job.stdout + job.stderr)
    found: dict[str, float] = json.loads(job.stdout[job.stdout.index("{") :])
    return found


def tree_of(other: str, folder: Path) -> Path:
    """Return a folder with the package of a commit, or the folder that ``other`` is."""
    if Path(other).is_dir():
        return Path(other).resolve()
    archive = subprocess.run(["git", "-C", str(HERE), "archive", other, "mpistrat"], stdout=subprocess.PIPE, check=True)
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


def compare(other: str, ranks: int, rounds: int) -> None:
    """Let jobs of both trees take turns, and print the ratios."""
    with tempfile.TemporaryDirectory() as scratch:
        tree, folder = tree_of(other, Path(scratch) / "tree"), Path(scratch)
        pairs = [(measured(HERE, ranks, folder), measured(tree, ranks, folder)) for _ in range(rounds)]
    for name in pairs[0][0]:
        mine, theirs = (min(seconds[name] for seconds in of_tree) for of_tree in zip(*pairs, strict=True))
        mark = "  WORSE" if mine > WORSE * theirs else ""
        print(f"{name:22} {1e6 * mine:10.2f} us  {mine / theirs:5.2f} of {other[:12]}{mark}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", nargs="?", default=(HERE / "packaging/last-release").read_text().strip())
    parser.add_argument("-n", type=int, default=2, help="ranks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure)
    else:
        compare(arguments.other, arguments.n, arguments.rounds)
