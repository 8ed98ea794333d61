"""Tests of ``check_finite``: a row with NaN or infinity raises, and the error names file, dataset and row."""

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mpistrat.data import AutoShardPolicy, Dataset, DistributedDataset, NotFiniteError, Options
from mpistrat.data.sources.files import first_not_finite

HOW = {"contiguous": {}, "gzip": {"chunks": (4, 3), "compression": "gzip"}, "lzf": {"compression": "lzf"}}


def write(path, dtype="f4", spoilt=None, value=np.nan, how=None):
    x = np.arange(30, dtype=dtype).reshape(10, 3)
    if spoilt is not None:
        x[spoilt, 1] = value
    with h5py.File(path, "w") as f:
        f.create_dataset("x", data=x, **(how or {}))
        f["y"] = np.arange(10)
    return str(path)


@settings(derandomize=True, database=None, deadline=None, max_examples=60)
@given(
    values=arrays.arrays(
        st.sampled_from([np.dtype(t) for t in ("f2", "f4", "f8", "c8", "i4")]),
        arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4),
    )
)
def test_first_row(values):
    wrong = [i for i, row in enumerate(values) if not np.isfinite(row).all()]
    found = first_not_finite(values)
    assert (found is None) == (not wrong)
    if found:
        assert found[0] == wrong[0]
        assert not np.isfinite(found[1])


def test_large_values_are_finite():
    for dtype in ("f2", "f4", "f8"):
        assert first_not_finite(np.full((3, 4), np.finfo(dtype).max, dtype)) is None
        assert first_not_finite(np.array([np.finfo(dtype).max, np.inf, -np.inf], dtype)) == (1, np.inf)


def test_inside_of_other_types():
    compound = np.zeros(4, [("a", "i4"), ("b", "f4", (2,))])
    assert first_not_finite(compound) is None
    compound["b"][2, 1] = np.inf
    assert first_not_finite(compound) == (2, np.inf)
    varying = np.empty((3, 2), object)
    for i in range(6):
        varying.flat[i] = np.ones(i)
    assert first_not_finite(varying) is None
    varying[1, 1][2] = -np.inf
    assert first_not_finite(varying) == (1, -np.inf)
    assert first_not_finite(np.array([b"nan", b"inf"])) is None


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", ["<f4", ">f8"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_file_dataset_and_row_are_named(tmp_path, how, dtype, shuffle):
    files = [write(tmp_path / f"{i}.h5", dtype, 7 if i == 1 else None, how=HOW[how]) for i in range(3)]
    dataset = Dataset.from_hdf5(files, ("y", "x"), check_finite=True)
    dataset = (dataset.shuffle(seed=3) if shuffle else dataset).batch(4)
    with pytest.raises(NotFiniteError, match=r"^file '.*/1\.h5', dataset 'x': row 7 has the value nan; fix: "):
        list(dataset)
    assert sum(len(x) for _, x in Dataset.from_hdf5(files, ("y", "x")).batch(4)) == 30


@pytest.mark.parametrize("policy", ["DATA", "FILE"])
def test_told_at_its_step_on_the_replica_that_reads_it(tmp_path, replicas, policy):
    files = [write(tmp_path / f"{i}.h5", spoilt=5 if i == 1 else None, value=-np.inf) for i in range(2)]
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy[policy]

    def replica(peer):
        dataset = Dataset.from_hdf5(files, "x", check_finite=True).batch(4).with_options(options)
        seen = 0
        try:
            for batch in DistributedDataset(dataset, peer):
                assert np.isfinite(batch).all()
                seen += 1
        except NotFiniteError as error:
            return seen, "1.h5', dataset 'x': row 5 has the value -inf" in str(error)
        return seen, None

    # Row 15 of all is the fourth row of batch 3. In its own file it is in the third batch of two rows.
    assert replicas(2, replica) == [(5, None), (3, True) if policy == "DATA" else (2, True)]
