"""Tests of rows that are read in any order, also those that lie side by side in the file, or backwards."""

import h5py
import numpy as np
import pytest

from mpistrat.data import Dataset

ROWS = 60
RNG = np.random.default_rng(0)
ORDERS = {
    "far": np.arange(0, ROWS, 3),
    "far, mixed": RNG.permutation(np.arange(0, ROWS, 3)),
    "a pair among many": np.array([40, 3, 9, 21, 4, 30, 50, 15, 0, 59]),
    "all, mixed": RNG.permutation(ROWS),
    "runs": np.r_[30:60, 5:20],
    "twice": np.array([7, 3, 7, 8, 50, 3]),
    "one": np.array([59]),
}


@pytest.fixture(scope="module", params=["contiguous", "chunks", "chunks, backwards"])
def source(request, tmp_path_factory):
    """Sources of rows of 1 KiB, 8 KiB and 20 KiB, of which each number of a file is another."""
    folder, made = tmp_path_factory.mktemp("rows"), {}
    for width in (256, 2048, 5000):
        x = np.arange(ROWS * width, dtype="i4").reshape(ROWS, width)
        with h5py.File(folder / f"{width}.h5", "w") as file:
            if request.param == "contiguous":
                file["x"] = x
            else:
                stored = file.create_dataset("x", x.shape, "i4", chunks=(2, width))
                for start in range(0, ROWS, 2)[:: -1 if "backwards" in request.param else 1]:
                    stored.id.write_direct_chunk((start, 0), x[start : start + 2].tobytes())
        made[width] = x, Dataset.from_hdf5(str(folder / f"{width}.h5"), "x").definition.source
    return made


@pytest.mark.parametrize("order", ORDERS)
def test_rows_are_those_of_numpy(source, order):
    for x, rows in source.values():
        assert (rows.read(ORDERS[order]) == x[ORDERS[order]]).all()
