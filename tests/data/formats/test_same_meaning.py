"""Rows of several files are one dataset only if they mean the same: what a dtype does not say is compared, too."""

import h5py
import numpy as np
import pytest

from mpistrat.data import Dataset, DatasetMismatchError

pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
ENUM, OTHER = ({"A": 0, "B": 1}, {"B": 0, "A": 1})
HDF5 = {
    "enumeration": (h5py.enum_dtype(ENUM, "i1"), h5py.enum_dtype(OTHER, "i1")),
    "numbers": (h5py.enum_dtype(ENUM, "i1"), np.dtype("i1")),
    "member": ([("e", h5py.enum_dtype(ENUM, "i1"))], [("e", h5py.enum_dtype(OTHER, "i1"))]),
    "array": (np.dtype((h5py.enum_dtype(ENUM, "i1"), 2)), np.dtype((h5py.enum_dtype(OTHER, "i1"), 2))),
    "order of members": ([("a", "f4"), ("b", "f4")], [("b", "f4"), ("a", "f4")]),
    "unit of times": (h5py.opaque_dtype(np.dtype("M8[s]")), h5py.opaque_dtype(np.dtype("M8[ms]"))),
}


def refused(read, paths):
    """Whatever comes first, both files and both types are named."""
    for order in (paths, paths[::-1]):
        with pytest.raises(DatasetMismatchError) as error:
            len(read(list(map(str, order))))
        assert all(str(path) in str(error.value) for path in paths)
        one, other = str(error.value).split(" in file ")[:2]
        assert one.rpartition("rows of ")[2] != other.rpartition("and of ")[2]


@pytest.mark.parametrize("kind", HDF5)
def test_hdf5_types(tmp_path, kind):
    paths = [tmp_path / "a.h5", tmp_path / "b.h5"]
    for path, dtype in zip(paths, HDF5[kind], strict=True):
        with h5py.File(path, "w") as file:
            file.create_dataset("x", (3,), dtype=dtype)[...] = np.zeros(3, dtype)
    refused(lambda files: Dataset.from_hdf5(files, "x"), paths)
    for path in paths:
        assert len(list(Dataset.from_hdf5([str(path)], "x").batch(3))) == 1


def test_hdf5_types_in_a_manifest(tmp_path):
    paths = [tmp_path / "a.h5", tmp_path / "b.h5"]
    for path in paths:
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=np.zeros(3, "i1"), dtype=h5py.enum_dtype(ENUM, "i1"))
    read = lambda: len(Dataset.from_hdf5([*map(str, paths)], "x", manifest=str(tmp_path / "kept")))  # noqa: E731
    assert read() == read() == 6


def test_units_of_hdf5_datasets(tmp_path):
    paths = [tmp_path / "a.h5", tmp_path / "b.h5"]
    for path, unit in zip(paths, ("days since 2000-01-01", np.bytes_("days since 2001-01-01")), strict=True):
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=np.zeros(3)).attrs["units"] = unit
            file.create_dataset("y", data=np.zeros(3)).attrs["units"] = "m" if unit == "m" else np.bytes_("m")
    refused(lambda files: Dataset.from_hdf5(files, "x"), paths)
    assert len(Dataset.from_hdf5([*map(str, paths)], "y")) == 6


PARQUET = {
    "time zone": (pa.timestamp("us", "UTC"), pa.timestamp("us")),
    "other time zone": (pa.timestamp("us", "UTC"), pa.timestamp("us", "Asia/Tokyo")),
    "unit": (pa.timestamp("us"), pa.timestamp("ms")),
    "time zone in a list": (pa.list_(pa.timestamp("us", "UTC"), 1), pa.list_(pa.timestamp("us"), 1)),
    "bytes": (pa.binary(), pa.decimal128(5, 2)),
    "strings": (pa.binary(), pa.string()),
}
VALUES = {"binary": b"1", "string": "1", "decimal128(5, 2)": 1}


@pytest.mark.parametrize("kind", PARQUET)
def test_parquet_types(tmp_path, kind):
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for path, dtype in zip(paths, PARQUET[kind], strict=True):
        value = [0] if pa.types.is_nested(dtype) or pa.types.is_fixed_size_list(dtype) else VALUES.get(str(dtype), 0)
        pq.write_table(pa.table({"x": pa.array([value] * 3, dtype)}), path)
    refused(lambda files: Dataset.from_parquet(files, "x"), paths)


def test_parquet_types_of_one_meaning(tmp_path):
    for number, kinds in enumerate(
        [(pa.string(), pa.large_string()), (pa.binary(), pa.large_binary()), (pa.decimal128(5, 2), pa.decimal128(9, 4))]
    ):
        paths = [str(tmp_path / f"{number}{end}.parquet") for end in "ab"]
        for path, kind in zip(paths, kinds, strict=True):
            pq.write_table(pa.table({"x": pa.array([VALUES[str(kinds[0])]] * 3, kind)}), path)
        assert len(Dataset.from_parquet(paths, "x")) == 6
        assert len(np.concatenate(list(Dataset.from_parquet(paths, "x").batch(6)))) == 6
