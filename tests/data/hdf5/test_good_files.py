"""Files that look odd, but that HDF5 reads: they have the same rows here."""

import zlib

import h5py
import numpy as np
import pytest

from mpistrat.data import Dataset, EmptyDatasetError


def rows(path, name="x"):
    return np.concatenate(list(Dataset.from_hdf5(path, name).batch(3)))


def test_virtual_dataset_of_scalars(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        layout = h5py.VirtualLayout((4,), "f8")
        for i in range(4):
            if i < 3:
                file[f"a{i}"] = i + 0.5
            else:
                file[f"a{i}"] = np.array([3.5])
            layout[i] = h5py.VirtualSource(".", f"a{i}", shape=file[f"a{i}"].shape, dtype="f8")
        file.create_virtual_dataset("x", layout)
    assert rows(path).tolist() == [0.5, 1.5, 2.5, 3.5]


def test_virtual_dataset_with_an_empty_mapping(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["raw"] = np.arange(9.0)
        for name, length in (("x", 4), ("none", 0)):
            layout = h5py.VirtualLayout((length,), "f8")
            layout[0:0] = h5py.VirtualSource(file["raw"])[0:0]
            if length:
                layout[:] = h5py.VirtualSource(file["raw"])[2:6]
            file.create_virtual_dataset(name, layout)
    assert rows(path).tolist() == [2, 3, 4, 5]
    with pytest.raises(EmptyDatasetError, match="none of the 1 files has a row"):
        len(Dataset.from_hdf5(path, "none"))


def test_chunks_that_skip_filters(tmp_path):
    """Chunks may skip different filters, and their masks may have bits for filters that do not exist."""
    path, values = tmp_path / "a.h5", np.arange(40, dtype="<i4").reshape(8, 5)

    def shuffled(chunk):
        return np.frombuffer(chunk.tobytes(), "u1").reshape(-1, 4).T.tobytes()

    with h5py.File(path, "w") as file:
        x = file.create_dataset("x", (8, 5), "<i4", chunks=(2, 5), shuffle=True, compression="gzip")
        for i, (mask, stored) in enumerate(
            [
                (0, lambda chunk: zlib.compress(shuffled(chunk))),
                (1, lambda chunk: zlib.compress(chunk.tobytes())),
                (2, shuffled),
                (0xF3, lambda chunk: chunk.tobytes()),
            ]
        ):
            x.id.write_direct_chunk((2 * i, 0), stored(values[2 * i : 2 * i + 2]), mask)
    with h5py.File(path) as file:
        assert (file["x"][...] == values).all()
    assert (rows(path) == values).all()
