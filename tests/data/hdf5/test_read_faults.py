"""Tests of faults in files that are read directly: they raise, and never give zeros."""

import os
import zlib

import h5py
import numpy as np
import pytest

from mpistrat.data import ChecksumError, DataFileError, Dataset, DatasetNotFoundError, DistributedDataset
from mpistrat.data.hdf5.chunks import fletcher32
from mpistrat.data.hdf5.describe import describe, way_of_reading


def stored(path, **how):
    with h5py.File(path, "w") as f:
        f.create_dataset("x", data=np.arange(1, 41, dtype="f4").reshape(20, 2), **how)
    return path


def opened(path, name="x"):
    dataset = Dataset.from_hdf5(path, name).batch(5)
    assert len(dataset) == 4
    return dataset


def chunk_of(path, number):
    with h5py.File(path, "r") as f:
        info = f["x"].id.get_chunk_info(number)
    return info.byte_offset, info.size


def overwrite(path, offset, data):
    """Change bytes, and leave the time of writing as it was."""
    times = os.stat(path)
    with open(path, "r+b") as f:
        f.seek(offset)
        f.write(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


HOW = {
    "contiguous": {},
    "chunks": {"chunks": (3, 2)},
    "gzip": {"chunks": (3, 2), "compression": "gzip"},
    "lzf": {"chunks": (3, 2), "compression": "lzf"},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_cut_off_while_it_is_read(tmp_path, how, prefetch, replicas):
    path = stored(tmp_path / "a.h5", **HOW[how])
    dataset = Dataset.from_hdf5(path, "x").batch(5).prefetch(prefetch)
    (distributed,) = replicas(1, lambda peer: DistributedDataset(dataset, peer))
    assert all(batch.all() for batch in distributed)
    size = os.path.getsize(path)
    os.truncate(path, size - 100)
    with pytest.raises(
        DataFileError, match=rf"a\.h5', dataset 'x': .*truncated.*\({size} bytes then, {size - 100} bytes now"
    ):
        list(distributed)


def test_cut_off_to_the_same_size(tmp_path):
    """Another program rewrites the file while it is open."""
    path = stored(tmp_path / "a.h5")
    dataset = opened(path)
    list(dataset)
    size = os.path.getsize(path)
    os.truncate(path, 0)
    os.truncate(path, size)
    with pytest.raises(DataFileError, match=r"a\.h5.*written to after it was described; fix: do not change"):
        list(dataset)


def test_touched_or_copied(tmp_path):
    """Another time of writing is not a change, if the description is the same."""
    path = stored(tmp_path / "a.h5")
    dataset = opened(path)
    first = list(dataset)
    os.utime(path, (1, 1))
    np.testing.assert_array_equal(list(dataset), first)
    copy = path.read_bytes()
    path.unlink()
    path.write_bytes(copy)
    np.testing.assert_array_equal(list(dataset), first)


def test_other_rows_of_the_same_size(tmp_path):
    """Other rows of the same size are detected, such as those of a renamed dataset."""
    path = stored(tmp_path / "a.h5")
    dataset = opened(path)
    with h5py.File(path, "r+") as f:
        f.move("x", "y")
    os.truncate(path, os.path.getsize(path))
    with pytest.raises(DataFileError, match=r"a\.h5.*written to after"):
        list(dataset)


@pytest.mark.parametrize("number", [0, 3, 6])
def test_damaged_chunks(tmp_path, number):
    path = stored(tmp_path / "a.h5", chunks=(3, 2), compression="gzip")
    offset, size = chunk_of(path, number)
    for data in (b"\xff" * size, zlib.compress(b"short").ljust(size, b"\0")):
        overwrite(path, offset, data)
        with pytest.raises(DataFileError, match=r"a\.h5', dataset 'x': rows \d+ to \d+ cannot be read") as caught:
            list(opened(path))
        assert not isinstance(caught.value, ChecksumError)


def test_damage_under_a_checksum(tmp_path):
    path = stored(tmp_path / "a.h5", chunks=(3, 2), fletcher32=True, shuffle=True)
    offset, _ = chunk_of(path, 2)
    overwrite(path, offset + 3, b"\x7f")
    dataset = Dataset.from_hdf5(path, "x")
    with pytest.raises(ChecksumError, match=r"dataset 'x': rows 5 to 9 cannot be read \(the stored checksum is 0x"):
        list(dataset.batch(5))
    with pytest.raises(ChecksumError, match="rows 0 to 19"):
        list(dataset.shuffle(seed=0).batch(20))


def test_rows_that_were_never_written(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as f:
        f.create_dataset("none", (20, 2), "f4")
        f.create_dataset("some", (20, 2), "f4", chunks=(3, 2))[:7] = 1
        f.create_dataset("meant", (20, 2), "f4", chunks=(3, 2), fillvalue=-1)[:7] = 1
    with pytest.raises(DataFileError, match=r"dataset 'none': its rows were never written"):
        Dataset.from_hdf5(path, "none")
    with pytest.raises(DataFileError, match=r"dataset 'some': .* never written, rows 9 to 11 first"):
        Dataset.from_hdf5(path, "some")
    (batch,) = Dataset.from_hdf5(path, "meant").batch(20)
    assert batch[:, 0].tolist() == [1.0] * 7 + [-1.0] * 13
    assert way_of_reading(describe(str(path), ["meant"]).columns[0]).startswith("h5py: a fill value")


# --- rows in other files ------------------------------------------------------------------


@pytest.fixture
def virtual(tmp_path):
    """Return a virtual dataset of two files that is read directly, and one that HDF5 must read."""
    for i in range(2):
        stored(tmp_path / f"s{i}.h5")
    with h5py.File(tmp_path / "v.h5", "w") as f:
        layout = h5py.VirtualLayout((20, 2), "f4")
        layout[:10] = h5py.VirtualSource("s0.h5", "x", (20, 2))[:10]
        layout[10:] = h5py.VirtualSource("s1.h5", "x", (20, 2))[10:]
        f.create_virtual_dataset("rows", layout)
        layout = h5py.VirtualLayout((20, 2), "f4")
        layout[:, 0] = h5py.VirtualSource("s0.h5", "x", (20, 2))[:, 0]
        layout[:, 1] = h5py.VirtualSource("s1.h5", "x", (20, 2))[:, 1]
        f.create_virtual_dataset("columns", layout)
    return tmp_path / "v.h5"


@pytest.mark.parametrize("name", ["rows", "columns"])
def test_a_source_that_goes(virtual, name):
    dataset = opened(virtual, name)
    os.rename(virtual.parent / "s1.h5", virtual.parent / "other.h5")
    with pytest.raises(DataFileError, match=r"s1\.h5', dataset '\w+': it can no longer be found"):
        list(dataset)
    os.rename(virtual.parent / "other.h5", virtual.parent / "s1.h5")
    assert len(list(dataset)) == 4
    os.truncate(virtual.parent / "s1.h5", 2100)
    with pytest.raises(DataFileError, match=r"s1\.h5', dataset '\w+': it was truncated"):
        list(dataset)


@pytest.mark.parametrize("name", ["rows", "columns"])
def test_a_source_that_is_wrong(virtual, name):
    source = virtual.parent / "s1.h5"
    size = os.path.getsize(source)
    os.truncate(source, size - 8)
    with pytest.raises(DataFileError, match=r"s1\.h5': it is truncated"):
        Dataset.from_hdf5(virtual, name)
    with h5py.File(source, "w") as f:
        f["y"] = 1
    with pytest.raises(DatasetNotFoundError, match=rf"'{name}': its rows lie in dataset 'x' of '.*s1\.h5'"):
        Dataset.from_hdf5(virtual, name)
    with h5py.File(source, "w") as f:
        f["x"] = np.ones((11, 2), "f4")
    with pytest.raises(DataFileError, match=rf"'{name}': its rows lie in '.*s1\.h5', where the shape is \(11, 2\)"):
        Dataset.from_hdf5(virtual, name)


def test_virtual_rows_without_a_source(tmp_path):
    stored(tmp_path / "s.h5")
    for fill in (None, 5):
        layout = h5py.VirtualLayout((25, 2), "f4")
        layout[:20] = h5py.VirtualSource("s.h5", "x", (20, 2))
        with h5py.File(tmp_path / "v.h5", "w") as f:
            f.create_virtual_dataset("v", layout, fillvalue=fill)
        if fill is None:
            with pytest.raises(DataFileError, match="it has rows without a source"):
                Dataset.from_hdf5(tmp_path / "v.h5", "v")
        else:
            (batch,) = Dataset.from_hdf5(tmp_path / "v.h5", "v").batch(25)
            assert batch[20:].tolist() == [[5, 5]] * 5


def test_a_gap_in_numbered_sources(tmp_path):
    for i in (0, 2):
        with h5py.File(tmp_path / f"s{i}.h5", "w") as f:
            f["x"] = np.ones((4, 2))
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    space = h5py.h5s.create_simple((12, 2), (h5py.h5s.UNLIMITED, 2))
    space.select_hyperslab((0, 0), (h5py.h5s.UNLIMITED, 1), (4, 2), (4, 2))
    plist.set_virtual(space, b"s%b.h5", b"x", h5py.h5s.create_simple((4, 2)))
    with h5py.File(tmp_path / "v.h5", "w") as f:
        whole = h5py.h5s.create_simple((12, 2), (h5py.h5s.UNLIMITED, 2))
        h5py.h5d.create(f.id, b"v", h5py.h5t.IEEE_F64LE, whole, plist)
    with pytest.raises(DataFileError, match=r"lie in 's1\.h5', which does not exist while 's2\.h5' does"):
        Dataset.from_hdf5(tmp_path / "v.h5", "v")


def test_external_storage_that_is_short(tmp_path):
    raw = tmp_path / "x.raw"
    stored(tmp_path / "a.h5", external=[(str(raw), 0, 160)])
    assert [float(x) for x in opened(tmp_path / "a.h5").definition.source.read(np.array([3, 0]))[:, 0]] == [7.0, 1.0]
    dataset = opened(tmp_path / "a.h5")
    os.truncate(raw, 150)
    with pytest.raises(DataFileError, match=r"x\.raw', dataset 'x': it was truncated"):
        list(dataset)
    with pytest.raises(DataFileError, match=r"'x': its rows lie in '.*x\.raw', which has 150 bytes"):
        Dataset.from_hdf5(tmp_path / "a.h5", "x")


def test_damage_is_said_only_where_a_checksum_proves_it(tmp_path):
    """A filter of HDF5's own may fail for other reasons than damage, also behind a checksum that is right."""
    path, wrong = tmp_path / "a.h5", b"\xff" * 40
    with h5py.File(path, "w") as file:
        made = file.create_dataset("x", (20, 2), "f4", chunks=(20, 2), compression="lzf", fletcher32=True)
        made.id.write_direct_chunk((0, 0), wrong + fletcher32(wrong).to_bytes(4, "little"))
    for told, kind in ((r"see the error, and .* if it is damaged$", DataFileError), ("is damaged", ChecksumError)):
        with pytest.raises(DataFileError, match=told) as caught:
            next(iter(opened(path)))
        assert type(caught.value) is kind
        overwrite(path, chunk_of(path, 0)[0] + 5, b"spoilt")
