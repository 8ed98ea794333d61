"""Tests of faulty data files: which rank raises, when, and with which message."""

import os
import warnings

import h5py
import numpy as np
import pytest

from mpistrat.data import (
    ChecksumError,
    DataFileError,
    Dataset,
    DatasetMismatchError,
    DatasetNotFoundError,
    DistributedDataset,
    EmptyDatasetError,
)


def write(path, rows=3, width=2, dtype="f4", **more):
    with h5py.File(path, "w") as f:
        f["x"] = np.ones((rows, width), dtype)
        for name, value in more.items():
            f[name] = value
    return path


@pytest.fixture
def good(tmp_path):
    return [write(tmp_path / f"good-{i}.h5") for i in range(3)]


def test_missing_files(tmp_path, good):
    with pytest.raises(FileNotFoundError, match=r"file '.*/none\.h5' does not exist"):
        Dataset.from_hdf5(tmp_path / "none.h5", "x")
    with pytest.raises(FileNotFoundError, match=r"pattern '.*/n\*\.h5' matches no file"):
        Dataset.from_hdf5([good[0], str(tmp_path / "n*.h5")], "x")
    with pytest.raises(ValueError, match="list of files is empty"):
        Dataset.from_hdf5([], "x")
    with pytest.raises(IsADirectoryError, match=r"\*\.h5"):
        Dataset.from_hdf5(tmp_path, "x")
    with pytest.raises(TypeError, match="strings or paths, not 3"):
        Dataset.from_hdf5([3], "x")


def test_names_of_datasets(tmp_path):
    path = write(tmp_path / "a.h5", **{"group/y": np.zeros(3)})
    with pytest.raises(DatasetNotFoundError, match=r"no dataset 'z'; it has 'group/y', 'x'; fix: "):
        Dataset.from_hdf5(path, ("x", "z"))
    with pytest.raises(DatasetNotFoundError, match="'group' is a group, not a dataset"):
        Dataset.from_hdf5(path, "group")
    with pytest.raises(TypeError, match="named by strings"):
        Dataset.from_hdf5(path, {"x": 3})
    with pytest.raises(ValueError, match="at least one"):
        Dataset.from_hdf5(path, ())
    assert issubclass(DatasetNotFoundError, ValueError)


def test_datasets_that_do_not_fit_inside_a_file(tmp_path):
    path = write(tmp_path / "a.h5", short=np.zeros(2), scalar=1.0, null=h5py.Empty("f4"))
    with pytest.raises(DatasetMismatchError, match="'x' has 3 rows and dataset 'short' has 2"):
        Dataset.from_hdf5(path, ("x", "short"))
    with pytest.raises(DatasetMismatchError, match="'scalar': it is a scalar"):
        Dataset.from_hdf5(path, "scalar")
    with pytest.raises(DatasetMismatchError, match="no data space"):
        Dataset.from_hdf5(path, "null")


def spoil(path, how):
    if how == "empty":
        open(path, "wb").close()
    elif how == "text":
        path.write_text("not a data file")
    elif how == "truncated":
        os.truncate(path, os.path.getsize(path) - 8)
    elif how == "unnamed":
        with h5py.File(path, "w") as f:
            f["other"] = 1
    elif how == "dtype":
        write(path, dtype="f8")
    elif how == "shape":
        write(path, width=5)
    elif how == "vanished":
        path.unlink()


BAD = {
    "empty": (DataFileError, r"it is empty \(0 bytes\)"),
    "text": (DataFileError, r"not an HDF5 file \(15 bytes\)"),
    "truncated": (DataFileError, "it is truncated"),
    "unnamed": (DatasetNotFoundError, "no dataset 'x'; it has 'other'"),
    "dtype": (DatasetMismatchError, r"float32 \(2,\) in file '.*good-0.*float64 \(2,\) in file '.*good-1"),
    "shape": (DatasetMismatchError, r"float32 \(5,\) in file '.*good-1"),
    "vanished": (DataFileError, "can no longer be found"),
}


@pytest.mark.parametrize("how", BAD)
def test_a_later_file_is_bad_for_one_process(good, how):
    dataset = Dataset.from_hdf5(good, "x")
    spoil(good[1], how)
    kind, text = BAD[how]
    with pytest.raises(kind, match=text) as caught:
        len(dataset)
    assert "good-1.h5" in str(caught.value)
    assert "fix: " in str(caught.value)
    assert "rank" not in str(caught.value)


@pytest.mark.parametrize("how", BAD)
def test_a_later_file_is_bad_for_all_replicas(good, how, replica_errors):
    dataset = Dataset.from_hdf5(good, "x").batch(2)
    spoil(good[1], how)

    def replica(peer):
        return DistributedDataset(Dataset.from_hdf5(good, "x").batch(2) if how != "vanished" else dataset, peer)

    errors = replica_errors(2, replica)
    kind, text = BAD[how]
    assert [type(error) for error in errors] == [kind] * 2
    assert str(errors[0]) == str(errors[1])
    with pytest.raises(kind, match=text):
        raise errors[0]
    assert str(errors[0]).startswith("rank 1 (")


def test_the_first_file_is_bad_at_once(good):
    spoil(good[0], "truncated")
    with pytest.raises(DataFileError, match=r"good-0\.h5.*truncated"):
        Dataset.from_hdf5(good, "x")


def test_empty_files(tmp_path, good, replicas):
    write(tmp_path / "good-1.h5", rows=0)
    with pytest.warns(UserWarning, match=r"good-1\.h5' has no rows and is skipped") as caught:
        assert len(Dataset.from_hdf5(good, "x")) == 6
    assert {each.filename for each in caught} == {__file__}
    for path in good:
        write(path, rows=0)
    with pytest.raises(EmptyDatasetError, match="none of the 3 files"):
        len(Dataset.from_hdf5(good, "x"))


def test_one_replica_warns_of_an_empty_file(tmp_path, good, replicas):
    write(tmp_path / "good-1.h5", rows=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        replicas(3, lambda p: DistributedDataset(Dataset.from_hdf5(good, "x").batch(3), p))
    assert ["has no rows" in str(each.message) for each in caught] == [True]


def test_other_lists_of_files_on_another_rank(good, replica_errors):
    for error in replica_errors(
        2, lambda p: DistributedDataset(Dataset.from_hdf5(good[: 2 + p.rank], "x").batch(2), p)
    ):
        assert isinstance(error, ValueError)
        assert "source is files of 3 names" in str(error)
        assert "on rank 1" in str(error)


@pytest.mark.parametrize("when", ["described", "open"])
def test_a_file_cut_off_later_never_gives_zeros(good, when):
    dataset = Dataset.from_hdf5(good, "x").batch(9)
    assert len(dataset) == 1
    if when == "open":
        (batch,) = dataset
        assert batch.all()
    os.truncate(good[2], 2048)
    with pytest.raises(DataFileError, match=r"good-2\.h5.*truncated"):
        list(dataset)


def test_a_file_rewritten_with_other_rows(good):
    dataset = Dataset.from_hdf5(good, "x")
    assert len(dataset) == 9
    size = os.path.getsize(good[1])
    write(good[1], rows=2)
    os.truncate(good[1], max(size, os.path.getsize(good[1])))
    with pytest.raises(DataFileError, match=r"good-1\.h5"):
        list(dataset)


def test_a_file_that_vanished(good):
    dataset = Dataset.from_hdf5(good, "x")
    assert len(dataset) == 9
    good[2].unlink()
    with pytest.raises(DataFileError, match=r"good-2\.h5.*can no longer be found"):
        list(dataset)


def test_bit_flip_under_a_checksum(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as f:
        f.create_dataset("x", data=np.full(100, 7, "u1"), chunks=(50,), fletcher32=True)
        offset = f["x"].id.get_chunk_info(1).byte_offset
    with open(path, "r+b") as f:
        f.seek(offset + 10)
        f.write(b"\x08")
    dataset = Dataset.from_hdf5(path, "x").batch(10)
    with pytest.raises(ChecksumError, match=r"a\.h5', dataset 'x': rows 50 to 59 cannot be read"):
        list(dataset)


def test_links_and_sources_in_other_files(tmp_path, good):
    with h5py.File(tmp_path / "links.h5", "w") as f:
        f["ok"] = h5py.ExternalLink("good-0.h5", "x")
        f["gone"] = h5py.ExternalLink("gone.h5", "x")
        f["astray"] = h5py.SoftLink("/nowhere")
        f["circle"] = h5py.SoftLink("/circle")
        layout = h5py.VirtualLayout((6, 2), "f4")
        layout[:3] = h5py.VirtualSource("good-0.h5", "x", (3, 2))
        layout[3:] = h5py.VirtualSource("good-1.h5", "x", (3, 2))
        f.create_virtual_dataset("both", layout)
        f.create_dataset("raw", (2,), "f4", external=[("raw.bin", 0, 8)])
    path = tmp_path / "links.h5"
    assert len(Dataset.from_hdf5(path, "ok")) == 3
    with pytest.raises(DatasetNotFoundError, match=r"link to 'x' in 'gone\.h5'"):
        Dataset.from_hdf5(path, "gone")
    with pytest.raises(DatasetNotFoundError, match="no dataset 'astray'"):
        Dataset.from_hdf5(path, "astray")
    with pytest.raises(DatasetNotFoundError, match=r"links\.h5' has no dataset 'circle'"):
        Dataset.from_hdf5(path, "circle")
    (batch,) = Dataset.from_hdf5(path, "both").batch(6)
    assert batch.all()
    assert batch.shape == (6, 2)
    with pytest.raises(DataFileError, match=r"rows lie in '.*raw\.bin', which does not exist"):
        Dataset.from_hdf5(path, "raw")
    good[1].unlink()
    with pytest.raises(DataFileError, match=r"rows lie in 'good-1\.h5'"):
        Dataset.from_hdf5(path, "both")


def test_filter_that_is_not_installed(tmp_path, monkeypatch):
    from mpistrat.data import FilterUnavailableError

    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as f:
        f.create_dataset("x", data=np.zeros(10), chunks=(5,), compression="lzf")
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda code: False)
    with pytest.raises(FilterUnavailableError, match=r"filter 32000 \(lzf\).*not installed"):
        Dataset.from_hdf5(path, "x")


@pytest.mark.skipif(not h5py.h5z.filter_avail(h5py.h5z.FILTER_SZIP), reason="HDF5 was built without szip")
def test_szip_after_a_filter_that_changes_lengths(tmp_path):
    """HDF5 stores a part of the last values, and reads what was in memory in place of the rest."""
    path, values = tmp_path / "a.h5", np.random.default_rng(0).integers(0, 256, (35, 5))
    nbit = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    nbit.set_filter(h5py.h5z.FILTER_NBIT, 0)
    options = {"dtype": ">u8", "chunks": (24, 1), "compression": "szip", "shuffle": True}
    with h5py.File(path, "w") as f:
        f.create_dataset("lost", data=values % 2, scaleoffset=8, **options)
        f.create_dataset("skipped", data=values, scaleoffset=8, **options)  # szip would make its chunks no smaller
        f.create_dataset("whole", data=values, dcpl=nbit, **options)
        masks = [f["skipped"].id.get_chunk_info(i).filter_mask for i in range(f["skipped"].id.get_num_chunks())]
    assert all(mask & 4 for mask in masks)
    with pytest.raises(DataFileError, match=r"dataset 'lost': its filter szip follows scaleoffset.*; fix: write it"):
        Dataset.from_hdf5(path, "lost")
    for name in ("whole", "skipped"):
        assert (np.concatenate(list(Dataset.from_hdf5(path, name).batch(7))) == values).all()
