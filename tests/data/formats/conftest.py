"""Small files of every format with the same rows, and what is wrong with others."""

from types import SimpleNamespace

import h5py
import numpy as np
import pytest

from mpistrat.data import Dataset
from tests.selection import core

SIZES = (13, 0, 7, 20)


def table(first, rows):
    numbers = np.arange(first, first + rows)
    return {"x": numbers / 2, "y": numbers}


def write_hdf5(path, columns):
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            file[name] = values


def write_npy(path, columns):
    np.save(path, np.stack([*columns.values()], axis=1))


def write_csv(path, columns):
    lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n")


def write_parquet(path, columns):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(columns), path, row_group_size=6)


def write_zarr(path, columns):
    zarr = pytest.importorskip("zarr")
    zarr.open_group(path, mode="w")
    for name, values in columns.items():
        made = zarr.open(path / name, mode="w", shape=values.shape, chunks=(6,), dtype=values.dtype)
        made[:] = values


def write_netcdf(path, columns):
    netcdf = pytest.importorskip("netCDF4")
    with netcdf.Dataset(path, "w") as file:
        file.createDimension("rows", None)
        for name, values in columns.items():
            file.createVariable(name, values.dtype, ("rows",))[:] = values


BOTH = ("x", "y")
FORMATS = {
    "hdf5": SimpleNamespace(end="h5", write=write_hdf5, read=lambda f, **k: Dataset.from_hdf5(f, BOTH, **k)),
    "netcdf": SimpleNamespace(end="nc", write=write_netcdf, read=lambda f, **k: Dataset.from_netcdf(f, BOTH, **k)),
    "npy": SimpleNamespace(
        end="npy",
        write=write_npy,
        read=lambda f, **k: Dataset.from_npy(f, **k).map(lambda row: (row[0], row[1].astype(int))),
    ),
    "csv": SimpleNamespace(end="csv", write=write_csv, read=lambda f, **k: Dataset.from_csv(f, BOTH, {"y": int}, **k)),
    "parquet": SimpleNamespace(
        end="parquet", write=write_parquet, read=lambda f, **k: Dataset.from_parquet(f, BOTH, **k)
    ),
    "zarr": SimpleNamespace(end="zarr", write=write_zarr, read=lambda f, **k: Dataset.from_zarr(f, BOTH, **k)),
}


@pytest.fixture(params=core(FORMATS, "npy", "csv"))
def form(request):
    return FORMATS[request.param]


@pytest.fixture
def files(form, tmp_path):
    """Files of 40 rows in all, one without rows; returns their pattern."""
    first = 0
    for number, rows in enumerate(SIZES):
        form.write(tmp_path / f"part-{number}.{form.end}", table(first, rows))
        first += rows
    return str(tmp_path / f"part-*.{form.end}")
