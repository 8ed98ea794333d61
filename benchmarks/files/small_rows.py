"""Compare shuffled epochs of small rows with programs written by hand.

``python benchmarks/files/small_rows.py --data DIR`` runs it.

Rows have 100 + 8 bytes and lie in 4 HDF5 files. The program written by hand reads the files as wholes, permutes
numbers, and takes each batch. "first" counts from making the dataset to the last batch, "later" is an epoch after that,
"1/8" has a shuffle memory of an eighth of the rows.

Where torch or TensorFlow is installed, their loaders get the same rows in memory: torch with the indices of a whole
batch at once, tf.data with a shuffle buffer of all rows.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import mpistrat
from mpistrat.data import Dataset, Options

BATCH, FILES, WIDTH = 128, 4, 25
LAYOUTS: dict[str, dict[str, Any]] = {"contiguous": {}, "gzip": {"compression": "gzip"}}


def made(folder: Path, layout: str, rows: int) -> list[Path]:
    """Return the files of a layout. They are written if they are missing."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{layout}-{rows}-{number}.h5" for number in range(FILES)]
    rng = np.random.default_rng(0)
    for number, path in enumerate(paths):
        first, stop = rows * number // FILES, rows * (number + 1) // FILES
        if path.exists():
            continue
        how = LAYOUTS[layout]
        with h5py.File(path, "w") as file:
            x = rng.random((stop - first, WIDTH), "f4")
            file.create_dataset("x", data=x, **({"chunks": (min(1000, len(x)), WIDTH), **how} if how else {}))
            y = np.arange(first, stop)
            file.create_dataset("y", data=y, **({"chunks": (min(1000, len(y)),), **how} if how else {}))
    return paths


def by_hand(paths: list[Path], seed: int) -> int:
    """Read, permute and take; return the number of rows."""
    xs, ys = [], []
    for path in paths:
        with h5py.File(path) as file:
            xs.append(file["x"][:])
            ys.append(file["y"][:])
    x, y = np.concatenate(xs), np.concatenate(ys)
    return taken(x, y, np.random.default_rng(seed).permutation(len(x)))


def taken(x: np.ndarray, y: np.ndarray, order: np.ndarray) -> int:
    """Take all batches in an order; return the number of rows."""
    rows = 0
    for start in range(0, len(order), BATCH):
        mine = order[start : start + BATCH]
        batch = x[mine], y[mine]
        rows += len(batch[1])
    return rows


def shuffled(paths: list[Path]) -> Dataset:
    """Return a dataset of the rows of these files, which knows nothing of them yet."""
    return Dataset.from_hdf5(paths, ("x", "y")).shuffle(seed=1).batch(BATCH)


def epoch(batches: Any) -> int:
    """Go through the batches; return the number of rows."""
    return sum(len(y) for _, y in batches)


def ways(folder: Path, rows: int) -> dict[str, Callable[[], int]]:
    """Return the programs to compare."""
    strategy = mpistrat.OneDeviceStrategy("cpu:0")
    found: dict[str, Callable[[], int]] = {}
    distribute = strategy.experimental_distribute_dataset
    eighth = Options()
    eighth.shuffle_memory = rows * (4 * WIDTH + 8) // 8
    for layout in LAYOUTS:
        paths = made(folder, layout, rows)
        later = distribute(shuffled(paths))
        found[f"{layout}, by hand"] = lambda paths=paths: by_hand(paths, 1)
        found[f"{layout}, first"] = lambda paths=paths: epoch(distribute(shuffled(paths)))
        found[f"{layout}, later"] = lambda later=later: epoch(later)
        found[f"{layout}, 1/8"] = lambda paths=paths: epoch(distribute(shuffled(paths).with_options(eighth)))
    x, y = np.random.default_rng(0).random((rows, WIDTH), "f4"), np.arange(rows)
    arrays = Dataset.from_arrays((x, y))
    permuted, ordered = distribute(arrays.shuffle(seed=1).batch(BATCH)), distribute(arrays.batch(BATCH))
    found["arrays, by hand"] = lambda: taken(x, y, np.random.default_rng(1).permutation(rows))
    found["arrays, shuffled"] = lambda: epoch(permuted)
    found["arrays, in order"] = lambda: epoch(ordered)
    with contextlib.suppress(ImportError):
        found |= of_torch(x, y)
    with contextlib.suppress(ImportError):
        found["tf.data"] = of_tensorflow(x, y)
    return found


def of_torch(x: np.ndarray, y: np.ndarray) -> dict[str, Callable[[], int]]:
    """Return loaders of torch that take all rows of a batch at once."""
    import torch
    from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

    class Rows(Dataset):
        def __len__(self) -> int:
            return len(x)

        def __getitems__(self, rows: list[int]) -> tuple[Any, Any]:
            return torch.from_numpy(x[rows]), torch.from_numpy(y[rows])

    tensors = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    sampler = BatchSampler(RandomSampler(tensors), BATCH, drop_last=False)
    by_sampler = DataLoader(tensors, sampler=sampler, batch_size=None)
    by_rows = DataLoader(Rows(), BATCH, shuffle=True, collate_fn=lambda batch: batch)
    return {"torch, BatchSampler": lambda: epoch(by_sampler), "torch, __getitems__": lambda: epoch(by_rows)}


def of_tensorflow(x: np.ndarray, y: np.ndarray) -> Callable[[], int]:
    """Return tf.data over slices."""
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=1).batch(BATCH)
    dataset = dataset.prefetch(tf.data.AUTOTUNE)
    return lambda: epoch(dataset.as_numpy_iterator())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder for the files")
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--repetitions", type=int, default=9)
    arguments = parser.parse_args()
    programs = ways(arguments.data, arguments.rows)
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(arguments.repetitions + 1):
        for name, program in programs.items():
            start = time.perf_counter()
            rows = program()
            seconds[name].append(time.perf_counter() - start)
            assert rows == arguments.rows, (name, rows)
    print(f"{'':24}{'rows/s':>14}{'us a batch':>12}{'best':>8}")
    for name, samples in seconds.items():
        median, best = sorted(samples[1:])[(len(samples) - 1) // 2], min(samples[1:])
        batches = -(-arguments.rows // BATCH)
        print(f"{name:24}{arguments.rows / median:14,.0f}{median / batches * 1e6:12.1f}{best / batches * 1e6:8.1f}")


if __name__ == "__main__":
    main()
