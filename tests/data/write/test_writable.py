"""What `write_hdf5` takes, and what it refuses before a file appears."""

import numpy as np
import pytest

from mpistrat.data import Dataset, DatasetMismatchError, write_hdf5

WORDS = np.array(["a", "bcd", "é"])


@pytest.mark.parametrize("rows", [{"s": WORDS}, Dataset.from_arrays({"s": WORDS}), [{"s": WORDS}]])
@pytest.mark.parametrize("options", [{}, {"chunk": 2}, {"compress": "gzip"}], ids=str)
def test_strings_of_any_kind_of_rows(rows, options, tmp_path):
    write_hdf5(tmp_path / "a.h5", iter(rows) if isinstance(rows, list) else rows, **options)
    found = [row.decode() for row in Dataset.from_hdf5(tmp_path / "a.h5", "s")]
    assert found == WORDS.tolist()


def test_a_chunk_may_be_a_number_of_numpy(tmp_path):
    write_hdf5(tmp_path / "a.h5", {"x": np.arange(5)}, chunk=np.int64(2))
    assert [int(x) for x in Dataset.from_hdf5(tmp_path / "a.h5", "x")] == [0, 1, 2, 3, 4]


TIMES = np.array(["2020-01-01"], "M8[s]")
SHAPES = Dataset.from_arrays({"x": np.zeros((2, 2))}).concatenate(Dataset.from_arrays({"x": np.zeros((2, 3))}))


@pytest.mark.parametrize(
    ("rows", "error", "text"),
    [
        ({"t": TIMES}, TypeError, "dataset 't': HDF5 has no type for datetime64"),
        (Dataset.from_arrays({"t": TIMES}), TypeError, "dataset 't': HDF5 has no type for datetime64"),
        (SHAPES, DatasetMismatchError, "dataset 'x' has rows of different shapes"),
        (Dataset.range(3).repeat(), ValueError, "endless dataset"),
        (Dataset.range(3).repeat().batch(2), ValueError, "endless dataset"),
        ({"x": np.float64(1)}, ValueError, "'x' is a scalar"),
    ],
    ids=["times", "times of a dataset", "shapes", "endless", "endless batches", "scalar"],
)
def test_rows_that_cannot_be_written(rows, error, text, tmp_path):
    with pytest.raises(error, match=text):
        write_hdf5(tmp_path / "a.h5", rows)
    assert not [*tmp_path.iterdir()]
