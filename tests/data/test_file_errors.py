"""Tests of file errors: file and fault are attributes, and the name of a dataset can be added."""

import pickle

import h5py
import numpy as np
import pytest

from mpistrat.data import ChecksumError, DataFileError, Dataset


@pytest.mark.parametrize("kind", [DataFileError, ChecksumError])
@pytest.mark.parametrize("path", ["a.h5", "it's: a file, dataset 'x'.h5"])
def test_the_dataset_is_named_once(kind, path):
    error = kind.of_file(path, "it was truncated: by 'x'; fix: copy it")
    assert (error.path, error.what) == (path, "it was truncated: by 'x'; fix: copy it")
    assert str(error) == f"file {path!r}: it was truncated: by 'x'; fix: copy it"
    named = pickle.loads(pickle.dumps(error)).in_dataset("x")
    assert type(named) is kind
    assert str(named) == f"file {path!r}, dataset 'x': it was truncated: by 'x'; fix: copy it"
    assert named.in_dataset("y") is named
    other = kind("manifest 'm.json' is stale")
    assert other.in_dataset("x") is other


def test_a_file_whose_name_has_that_of_the_dataset(tmp_path):
    """The error names the dataset even if the path contains its name."""
    path = tmp_path / "dataset 'x'.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros((64, 4))
    dataset = Dataset.from_hdf5(path, "x")
    len(dataset)
    path.write_bytes(path.read_bytes()[:1500])
    with pytest.raises(DataFileError, match=r"\.h5\"?'?, dataset 'x': it was truncated after it was described"):
        list(dataset.batch(8))
