"""Tests of arrays of zarr as sequences of rows."""

import numpy as np
import pytest

from mpistrat.data import ArraySpec, Dataset

zarr = pytest.importorskip("zarr")


def test_rows_of_a_zarr_array(tmp_path):
    values = np.arange(60, dtype="f4").reshape(20, 3)
    made = zarr.open(tmp_path / "x.zarr", mode="w", shape=(20, 3), chunks=(4, 2), dtype="f4")
    made[:] = values
    array = zarr.open(tmp_path / "x.zarr", mode="r")
    dataset = Dataset.from_sequence(array)
    assert (len(dataset), dataset.element_spec) == (20, ArraySpec((3,), "f4"))
    assert np.concatenate(list(dataset.batch(7))).tolist() == values.tolist()
    (shuffled,) = dataset.shuffle(seed=1).batch(20)
    assert sorted(shuffled.tolist()) == values.tolist() != shuffled.tolist()
    rows = np.array([7, 3, 4, 7, 19])
    assert dataset.definition.source.read(rows).tolist() == values[rows].tolist()


def test_zarr_arrays_without_rows(tmp_path):
    empty = zarr.open(tmp_path / "x.zarr", mode="w", shape=(0, 3), dtype="f4")
    with pytest.raises(ValueError, match="is empty"):
        Dataset.from_sequence(empty)
    scalar = zarr.open(tmp_path / "y.zarr", mode="w", shape=(), dtype="f4")
    with pytest.raises(ValueError, match="scalar"):
        Dataset.from_sequence(scalar)
