"""Files with damage at any place: rows are right, or refused by an error that names the file and says what to do."""

import re
import warnings

import h5py
import numpy as np
import pytest

from mpistrat.data import (
    DataFileError,
    Dataset,
    DatasetMismatchError,
    DatasetNotFoundError,
    DistributedDataset,
    EmptyDatasetError,
    FilterUnavailableError,
)
from mpistrat.data.write.write import shard

# What damage may look like: a type, a shape, a name or a filter that another file could have had.
REFUSED = (DataFileError, DatasetMismatchError, DatasetNotFoundError, EmptyDatasetError, FilterUnavailableError)
ROWS = np.arange(1, 73, dtype="f4").reshape(24, 3)


def create(path, libver="earliest", maxshape=None, early=False, filters=(), chunk=(5, 3), dtype=None, rows=ROWS):
    """A file with the rows in the dataset ``"x"``, stored so."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if chunk:
        plist.set_chunk(chunk)
    if "shuffle" in filters:
        plist.set_shuffle()
    if "gzip" in filters:
        plist.set_deflate(4)
    if "lzf" in filters:
        plist.set_filter(h5py.h5z.FILTER_LZF, h5py.h5z.FLAG_OPTIONAL)
    if early:
        plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    unlimited = None if maxshape is None else tuple(h5py.h5s.UNLIMITED if m is None else m for m in maxshape)
    with h5py.File(path, "w", libver=libver) as file:
        kind = h5py.h5t.py_create(np.dtype(dtype or rows.dtype), logical=True)
        space = h5py.h5s.create_simple(rows.shape, unlimited)
        h5py.Dataset(h5py.h5d.create(file.id, b"x", kind, space, plist))[...] = rows
    return path


def read(path):
    """The rows that the library gives, or the error that refuses them; any other error is the test's failure."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return np.concatenate(list(Dataset.from_hdf5(path, "x").batch(7)))
    except REFUSED as error:
        assert str(path) in str(error)  # noqa: PT017 - or nothing is raised
        assert "fix: " in str(error)  # noqa: PT017
        return error


def read_by_hdf5(path):
    """What h5py alone gives, None if it raises anything."""
    try:
        with h5py.File(path) as file:
            return file["x"][...]
    except Exception:
        return None


def same(one, other):
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


def used(data):
    """The places of a file but for long runs of zeros, which are room for more entries."""
    return {place for run in re.finditer(rb"(?:[^\0]|\0{1,24}(?=[^\0]))+", data) for place in range(*run.span())}


def damaged(path, data, place, bits):
    data[place] ^= bits
    path.write_bytes(data)
    data[place] ^= bits
    return path


FILES = {
    "contiguous": {"chunk": None},
    "chunks": {},
    "gzip": {"filters": ("shuffle", "gzip")},
    "latest": {"libver": "latest"},
    "through h5py": {"filters": ("lzf",)},
    "words": {"rows": np.array([[b"a", b"bc"], [b"", b"def"]], "S3"), "chunk": (1, 2)},
}


@pytest.mark.full
@pytest.mark.parametrize("file", FILES)
def test_every_byte_flipped_once(tmp_path, file):
    """Where rows are wrong, HDF5 itself reads the same ones without an error."""
    data = bytearray(create(tmp_path / "whole.h5", **FILES[file]).read_bytes())
    truth = read(tmp_path / "whole.h5")
    refused = 0
    for place in sorted(used(data)):
        path = damaged(tmp_path / "spoilt.h5", data, place, 0xFF if place % 3 == 0 else 1 << place % 8)
        found = read(path)
        if isinstance(found, Exception):
            refused += 1
        elif not same(found, truth):
            hdf5 = read_by_hdf5(path)
            assert hdf5 is not None, place
            assert same(found, hdf5.astype(found.dtype)), place
    assert refused > 50


INDEXES = {
    "B-tree of version 1": ("TREE", {}),
    "B-tree of version 1, filters": ("TREE", {"filters": ("shuffle", "gzip")}),
    "B-tree of version 1, read through h5py": ("TREE", {"filters": ("lzf",)}),
    "B-tree of version 1, parts of rows": ("TREE", {"chunk": (7, 2)}),
    "fixed array": ("FADB", {"libver": "latest"}),
    "extensible array": ("EAIB", {"libver": "latest", "maxshape": (None, 3)}),
    "B-tree of version 2": ("BTLF", {"libver": "latest", "maxshape": (None, None)}),
    "B-tree of version 2, filters": ("BTLF", {"libver": "latest", "maxshape": (None, None), "filters": ("gzip",)}),
    "implicit": ("OHDR", {"libver": "latest", "early": True}),
    "single chunk": ("OHDR", {"libver": "latest", "chunk": (24, 3)}),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", INDEXES)
def test_every_bit_of_an_index_of_chunks(tmp_path, kind):
    """Rows are right or refused, but for one thing: where no checksum is, a chunk may be said to lie elsewhere."""
    signature, storage = INDEXES[kind]
    data = bytearray(create(tmp_path / "whole.h5", **storage).read_bytes())
    assert same(read(tmp_path / "whole.h5"), ROWS)
    with h5py.File(tmp_path / "whole.h5") as file:
        x = file["x"]
        chunks = []
        x.id.chunk_iter(chunks.append)
        addresses = {each.byte_offset.to_bytes(8, "little") for each in chunks}
        filtered = x.id.get_create_plist().get_nfilters() > 0
    start = data.rfind(signature.encode())  # the index of the chunks comes after that of names
    stored = {byte for each in chunks for byte in range(each.byte_offset, each.byte_offset + each.size)}
    index = sorted(used(data[: start + 320]) - stored - set(range(start)))
    refused = 0
    for place in index:
        for bit in range(8):
            path = damaged(tmp_path / "spoilt.h5", data, place, 1 << bit)
            found = read(path)
            if isinstance(found, Exception):
                refused += 1
            elif not same(found, ROWS):
                # Bytes that belong to no other chunk may be a chunk: only a checksum could tell. So for masks.
                assert signature == "TREE", (place - start, bit)
                assert filtered or any(bytes(data[place - i : place - i + 8]) in addresses for i in range(8))
                assert same(found, read_by_hdf5(path))
                changed = (found != ROWS).any(axis=1)
                assert np.ptp(np.flatnonzero(changed)) < storage.get("chunk", (5, 3))[0]
    assert refused > len(index)


def test_every_bit_of_the_parameter_of_shuffle(tmp_path):
    """HDF5 itself gives bytes of several elements as one element."""
    data = bytearray(create(tmp_path / "whole.h5", filters=("shuffle", "gzip")).read_bytes())
    start = data.index(b"shuffle\0") + 8
    assert int.from_bytes(data[start : start + 4], "little") == ROWS.itemsize
    for bit in range(32):
        found = read(damaged(tmp_path / "spoilt.h5", data, start + bit // 8, 1 << bit % 8))
        assert isinstance(found, DataFileError), bit


@pytest.mark.parametrize("place", [40, 120])  # where the file ends; the group of the dataset
def test_every_replica_names_the_damaged_file(tmp_path, replica_errors, place):
    for number in range(6):
        create(tmp_path / f"part-{number}.h5")
    path = tmp_path / "part-2.h5"
    damaged(path, bytearray(path.read_bytes()), place, 1)
    errors = replica_errors(
        3, lambda peer: DistributedDataset(Dataset.from_hdf5(tmp_path / "part-*.h5", "x").batch(6), peer)
    )
    for error in errors:
        assert isinstance(error, DataFileError)
        assert "part-2.h5" in str(error)
        assert "dataset 'x'" in str(error) or "truncated" in str(error)
        assert "fix: " in str(error)


@pytest.mark.full
def test_damaged_inputs_of_shard_are_named(tmp_path):
    data = bytearray(create(tmp_path / "whole.h5").read_bytes())
    refused = 0
    for place in sorted(used(data))[::3]:
        path = damaged(tmp_path / "spoilt.h5", data, place, 0xFF)
        try:
            shard([str(path)], tmp_path / f"out-{place}", 2)
        except REFUSED as error:
            refused += 1
            assert str(path) in str(error)  # noqa: PT017 - or nothing is raised
    assert refused > 50
