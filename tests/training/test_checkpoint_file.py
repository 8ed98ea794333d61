"""The file of a checkpoint: what is in it, and that no damage goes unnoticed."""

import io
import os
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpistrat.data import ChecksumError, DataFileError
from mpistrat.storage import layout
from mpistrat.storage.hdf5 import SparseFile
from mpistrat.storage.layout import NewArray, checksum
from mpistrat.training.checkpoint import object_graph
from mpistrat.training.checkpoint import write as write_module
from mpistrat.training.checkpoint.read import contents, described, read
from mpistrat.training.checkpoint.write import NewCheckpoint, write

DTYPES = ["f2", "f4", "f8", "i1", "u8", "?", "c8", "c16", ">f4", ">i2", "S3", [("a", "i4"), ("b", "f8", 2)]]


def empty_like(values):
    return {name: np.empty_like(value) for name, value in values.items()}


def some(shape=(5, 3), dtype="f4", seed=0):
    return np.random.default_rng(seed).integers(0, 100, shape).astype(dtype)


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(layout, "_PIECE", 64)


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (1000,), (7, 600)])
def test_any_dtype_and_shape(tmp_path, small_pieces, shape):
    values = {f"group {i}/ä": np.zeros(shape, dtype) for i, dtype in enumerate(DTYPES)}
    values |= {"bfloat16": some(shape, ml_dtypes.bfloat16), "words": some(shape, "i8").astype("S3")}
    for i, dtype in enumerate(DTYPES[:10]):
        values[f"group {i}/ä"] = some(shape, dtype, i)
    write(values, tmp_path / "v.h5")
    found = empty_like(values)
    read(found, tmp_path / "v.h5")
    for name, value in values.items():
        np.testing.assert_array_equal(found[name], value)
    with h5py.File(tmp_path / "v.h5") as file:  # any program reads it
        for name, value in values.items():
            assert file[name].shape == shape
            if name != "bfloat16":
                assert file[name].dtype == value.dtype
                np.testing.assert_array_equal(file[name][()], value)
        np.testing.assert_array_equal(file["bfloat16"][()], values["bfloat16"].view("u2"))
        assert file["bfloat16"].attrs["dtype"] == b"bfloat16"


@pytest.mark.full
def test_many_arrays(tmp_path):
    """So many that HDF5 does not keep all of its index in its cache."""
    values = {f"layer {i // 100}/{i}": np.full(i % 7 * 100, i) for i in range(1500)}
    write(values, tmp_path / "v.h5")
    found = empty_like(values)
    read(found, tmp_path / "v.h5")
    assert all(np.array_equal(found[name], value) for name, value in values.items())


def test_files_of_earlier_versions(tmp_path):
    """They have no checksums; every dataset says its dtype."""
    half = some((4,), ml_dtypes.bfloat16)
    with h5py.File(tmp_path / "v.h5", "w") as file:
        for name, value in (("a/b", some()), ("half", half.view("u2"))):
            file.create_dataset(name, data=value).attrs["dtype"] = "bfloat16" if name == "half" else value.dtype.name
    found = {"a/b": np.empty((5, 3), "f4"), "half": np.empty(4, ml_dtypes.bfloat16)}
    read(found, tmp_path / "v.h5")
    np.testing.assert_array_equal(found["a/b"], some())
    np.testing.assert_array_equal(found["half"], half)


def test_datasets_that_were_stored_anew(tmp_path, small_pieces):
    """Another program may have copied the file into chunks, with the attributes."""
    values = {"v": some((100, 3))}
    write(values, tmp_path / "v.h5")
    with h5py.File(tmp_path / "v.h5") as old, h5py.File(tmp_path / "new.h5", "w") as new:
        new.attrs.update(old.attrs)
        new.create_dataset("v", data=old["v"], chunks=(7, 3), compression="gzip").attrs.update(old["v"].attrs)
    found = empty_like(values)
    read(found, tmp_path / "new.h5")
    np.testing.assert_array_equal(found["v"], values["v"])
    with h5py.File(tmp_path / "new.h5", "r+") as file:
        file["v"][50, 1] += 1
    with pytest.raises(ChecksumError, match=r"new\.h5', dataset 'v': bytes 576 to 639"):
        read(found, tmp_path / "new.h5")


def test_what_is_spoilt_is_named(tmp_path, small_pieces):
    values = {"a": some((40, 40)), "b": some((40, 40), seed=1)}
    write(values, tmp_path / "v.h5")
    with h5py.File(tmp_path / "v.h5") as file:
        offset = file["b"].id.get_offset()
    data = bytearray((tmp_path / "v.h5").read_bytes())
    data[offset + 200] ^= 16
    (tmp_path / "v.h5").write_bytes(data)
    read({"a": np.empty((40, 40), "f4")}, tmp_path / "v.h5")
    with pytest.raises(ChecksumError, match=r"v\.h5', dataset 'b': bytes 192 to 255 .* fix: load an earlier"):
        read(empty_like(values), tmp_path / "v.h5")


def test_checksums_that_are_missing(tmp_path):
    write({"v": some()}, tmp_path / "v.h5")
    with h5py.File(tmp_path / "v.h5", "r+") as file:
        del file["v"].attrs["checksums"]
    with pytest.raises(DataFileError, match="dataset 'v': its checksums are missing"):
        read({"v": some()}, tmp_path / "v.h5")


@pytest.mark.parametrize(
    ("attribute", "value", "told"),
    [
        ("format_version", 2, r"a later version of mpistrat wrote it \(format 2, and 1 is the last"),
        ("format_version", [1, 2], "its attributes cannot be read"),
        ("checksum", np.bytes_("crc64"), "of the kind 'crc64', which this version does not know: update mpistrat"),
    ],
)
def test_a_file_of_a_later_version(tmp_path, attribute, value, told):
    write({"v": some()}, tmp_path / "v.h5")
    with h5py.File(tmp_path / "v.h5", "r+") as file:
        file.attrs[attribute] = value
    for action in (lambda: read({"v": some()}, tmp_path / "v.h5"), lambda: described(tmp_path / "v.h5")):
        with pytest.raises(DataFileError, match=rf"v\.h5': .*{told}"):
            action()


def test_shapes_that_the_file_has_no_bytes_for(tmp_path):
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file.create_dataset("v", (1 << 40,), "f8")
    with pytest.raises(DataFileError, match=r"dataset 'v': it has 8796093022208 bytes, and MPISTRAT_DATA_BLOCK"):
        contents(tmp_path / "v.h5")


def refused_or_right(values, path):
    found = empty_like(values)
    try:
        read(found, path)
    except (DataFileError, ValueError) as error:
        assert str(path) in str(error)  # noqa: PT017 - or nothing is raised
        return "refused"
    for name, value in values.items():
        np.testing.assert_array_equal(found[name], value)
    return "right"


@pytest.mark.full
def test_truncated_anywhere(tmp_path):
    values = {"a": some(), "b": some((30, 50), seed=1)}
    write(values, tmp_path / "whole.h5")
    data = (tmp_path / "whole.h5").read_bytes()
    for length in {*range(0, len(data), 97), *range(200), *range(len(data) - 200, len(data))}:
        (tmp_path / "cut.h5").write_bytes(data[:length])
        with pytest.raises(DataFileError, match=r"cut\.h5"):
            read(empty_like(values), tmp_path / "cut.h5")


def test_zeros_anywhere(tmp_path):
    """As file systems leave them where a write was lost."""
    values = {"a": some(), "b": some((100, 50), seed=1) + 1}
    write(values, tmp_path / "whole.h5")
    data = (tmp_path / "whole.h5").read_bytes()
    with h5py.File(tmp_path / "whole.h5") as file:
        of_b = range(file["b"].id.get_offset(), file["b"].id.get_offset() + values["b"].nbytes)
    for start in range(0, len(data), 512):
        spoilt = data[:start] + bytes(min(512, len(data) - start)) + data[start + 512 :]
        (tmp_path / "spoilt.h5").write_bytes(spoilt)
        ended = refused_or_right(values, tmp_path / "spoilt.h5")
        assert ended == "refused" or start not in of_b


@pytest.mark.full
def test_a_bit_anywhere(tmp_path):
    values = {"a": some((3,)), "b/c": some((4, 2), ml_dtypes.bfloat16)}
    write(values, tmp_path / "whole.h5")
    data = bytearray((tmp_path / "whole.h5").read_bytes())
    ended = set()
    for place in np.flatnonzero(np.frombuffer(data, "u1")).tolist():
        data[place] ^= 1 << place % 8
        (tmp_path / "spoilt.h5").write_bytes(data)
        data[place] ^= 1 << place % 8
        ended.add(refused_or_right(values, tmp_path / "spoilt.h5"))
    assert "refused" in ended


@given(st.binary(max_size=20_000), st.data())
def test_checksums_tell_changed_and_moved_bytes(data, draw):
    expected = checksum(memoryview(data), "v")
    assert checksum(memoryview(bytes(data)), "v") == expected
    if data:
        place = draw.draw(st.integers(0, len(data) - 1))
        changed = bytearray(data)
        changed[place] ^= draw.draw(st.integers(1, 255))
        assert checksum(memoryview(changed), "v") != expected


def test_checksums_tell_pages_that_were_exchanged():
    data = np.random.default_rng(0).bytes(3 * 4096)
    one, two, three = (data[i : i + 4096] for i in range(0, len(data), 4096))
    orders = (data, two + one + three, one + three + two, one + one + three, one + two)
    assert len({checksum(memoryview(each), "v") for each in orders}) == len(orders)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("size", [4096, 1 << 20])
def test_the_first_error_of_a_writer_is_raised(size, tmp_path):
    values = {str(i): np.zeros(size, "u1") for i in range(100)}
    arrays = {name: NewArray(each.dtype, each.shape) for name, each in values.items()}
    with pytest.raises(
        OSError, match=f"No space left on device, so a checkpoint of {100 * size} bytes was not written"
    ):
        NewCheckpoint(arrays, values, tmp_path / "a").write(Path("/dev/full"), [*range(100)])


def test_a_flush_that_fails_is_raised(tmp_path, monkeypatch):
    def fails(descriptor):
        raise OSError(5, "the disk is broken")

    monkeypatch.setattr(write_module, "_flush", fails)
    arrays, temporary = {"a": NewArray(np.dtype("f8"), (3,))}, tmp_path / "a.tmp"
    new = NewCheckpoint(arrays, {"a": np.ones(3)}, tmp_path / "a", size=2)
    new.make(temporary)
    with pytest.raises(OSError, match="the disk is broken, so a checkpoint of 24 bytes was not written"):
        new.write(temporary, [0])


@given(st.lists(st.tuples(st.integers(0, 30_000), st.binary(max_size=9_000)), max_size=12))
def test_sparse_files_are_files(pieces):
    sparse, real = SparseFile(), io.BytesIO()
    for offset, data in pieces:
        for file in (sparse, real):
            file.seek(offset)
            if data:
                assert file.write(data) == len(data)
    assert sparse.size == len(real.getvalue())
    for offset, data in [*pieces, (0, b"x" * 40_000)]:
        buffers = bytearray(len(data) + 5), bytearray(len(data) + 5)
        for file, buffer in zip((sparse, real), buffers, strict=True):
            file.seek(offset)
            count = file.readinto(buffer)
            assert file.tell() == offset + count
        assert buffers[0] == buffers[1]
    again = bytearray(sparse.size)
    for offset, data in sparse.written():
        again[offset : offset + len(data)] = data
    assert bytes(again) == real.getvalue()


@settings(deadline=None, max_examples=100)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(st.characters(), max_size=4),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=8,
    )
)
@example("\ud83d\ude00")
@example([-(7**9999), {"key": os.fsdecode(b"\xf0\x9f")}])
def test_a_state_comes_back_as_it_was(state):
    assert object_graph.unpack_state(object_graph.pack_state(state)) == state


@pytest.mark.parametrize("key", [1, "\ud83d\ude00", "\0int"])
def test_a_key_that_json_would_change_is_refused(key):
    with pytest.raises(TypeError, match="a key of a state"):
        object_graph.pack_state([{key: 1}])
