"""The HDF5 files for measurements of reading, made once from a seed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpistrat.process.files import appearing

ROW = (64, 64, 3)  # float32: 48 KiB
ROW_BYTES = 4 * 64 * 64 * 3
FILES = 4
_CHUNK_ROWS = 32
_ROWS_AT_ONCE = 256


def layouts() -> dict[str, dict[str, Any]]:
    """Return the layouts of rows by name, with their arguments of h5py."""
    chunk = (_CHUNK_ROWS, *ROW)
    found: dict[str, dict[str, Any]] = {
        "contiguous": {},
        "chunks of 1 row": {"chunks": (1, *ROW)},
        f"chunks of {_CHUNK_ROWS} rows": {"chunks": chunk},
        "gzip": {"chunks": chunk, "compression": "gzip"},
    }
    try:
        import hdf5plugin
    except ImportError:
        return found
    return {**found, "zstd": {"chunks": chunk, **hdf5plugin.Zstd(clevel=3)}}


def made(folder: Path, layout: str, how: dict[str, Any], nbytes: int, seed: int) -> list[str]:
    """Return the files of a layout, with ``nbytes`` in all when decoded. Make those that are missing.

    Raise FileExistsError if a file of that name has other contents.
    """
    rows = max(_CHUNK_ROWS, nbytes // ROW_BYTES // FILES)
    paths = []
    for number in range(FILES):
        path = folder / f"input-{layout.replace(' ', '-')}-{rows}-{number}.h5"
        paths.append(str(path))
        mark = f"benchmarks/files/input.py, {layout}, {rows} rows, seed {seed}"
        if path.exists():
            _check(path, mark)
            continue
        rng = np.random.default_rng([seed, number])
        with appearing(path, replace=False) as temporary, h5py.File(temporary, "w") as file:
            file.attrs["made by"] = mark
            x = file.create_dataset("x", (rows, *ROW), "f4", **how)
            for start in range(0, rows, _ROWS_AT_ONCE):
                # Smooth rows, like pictures, so that compression has an effect.
                steps = rng.integers(-2, 3, (min(_ROWS_AT_ONCE, rows - start), *ROW), np.int8)
                x[start : start + len(steps)] = np.cumsum(steps, axis=2, dtype=np.float32) / 8
    return paths


def _check(path: Path, mark: str) -> None:
    with h5py.File(path, "r") as file:
        found = file.attrs.get("made by")
    if found != mark:
        raise FileExistsError(f"{path} is {found!r} and not {mark!r}: choose another --data, or remove it")


def forget(paths: list[str]) -> bool:
    """Drop the files from the page cache. Return False if they are still there, or it is not known."""
    dropped = hasattr(os, "posix_fadvise") and hasattr(os, "RWF_NOWAIT")
    for path in paths if dropped else []:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            dropped = dropped and not _in_memory(descriptor)
        finally:
            os.close(descriptor)
    return dropped


def _in_memory(descriptor: int) -> bool:
    try:
        os.preadv(descriptor, [bytearray(1)], os.fstat(descriptor).st_size // 2, os.RWF_NOWAIT)
    except OSError:
        return False
    return True
