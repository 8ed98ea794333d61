"""Tests of direct reads: rows equal those of h5py bit by bit, for every layout."""

import json

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import core

from mpistrat.data import DataFileError, Dataset
from mpistrat.data.hdf5.chunks import fletcher32
from mpistrat.data.hdf5.describe import describe, way_of_reading
from mpistrat.data.hdf5.raw import Descriptor, scatter
from mpistrat.data.hdf5.records import Chunked, from_json, to_json

hdf5plugin = pytest.importorskip("hdf5plugin")
pytest.importorskip("zstandard")

ROWS, WIDTH, DEPTH = 53, 7, 5
RNG = np.random.default_rng(0)
FLOATS = RNG.standard_normal((ROWS, WIDTH, DEPTH)).astype("f4")
COMPOUND = np.zeros(ROWS, [("n", ">i2"), ("v", "<f8", (3,)), ("s", "S3")])
COMPOUND["n"], COMPOUND["v"], COMPOUND["s"] = np.arange(ROWS), RNG.random((ROWS, 3)), b"xy"
WHOLE = {"chunks": (4, WIDTH, DEPTH)}
CUT = {"chunks": (6, 3, 2), "maxshape": (None, WIDTH, None)}

# Name -> the data, the options of storing it, and the beginning of `way_of_reading`.
STORED = {
    "contiguous": (FLOATS, {}, "direct: contiguous"),
    "one number a row": (np.arange(ROWS, dtype="i8"), {}, "direct: contiguous"),
    "wide rows": (RNG.integers(0, 255, (ROWS, 3000), "u1"), {}, "direct: contiguous"),
    "whole rows": (FLOATS, WHOLE, "direct: chunks of 4 rows"),
    "one row a chunk": (FLOATS, {"chunks": (1, WIDTH, DEPTH)}, "direct: chunks of 1 rows"),
    "chunk larger than the data": (FLOATS, {"chunks": (64, 8, 8), "maxshape": (None,) * 3}, "direct: chunks"),
    "cut rows": (FLOATS, CUT, "direct: chunks of 6 rows"),
    "gzip": (FLOATS, {**WHOLE, "compression": "gzip"}, "direct: chunks of 4 rows, gzip"),
    "shuffle": (FLOATS, {**WHOLE, "shuffle": True}, "direct: chunks of 4 rows, shuffle"),
    "fletcher32": (FLOATS, {**CUT, "fletcher32": True}, "direct: chunks of 6 rows, fletcher32"),
    "gzip, shuffle, fletcher32": (
        FLOATS,
        {**CUT, "compression": "gzip", "shuffle": True, "fletcher32": True},
        "direct: chunks of 6 rows, shuffle + gzip + fletcher32",
    ),
    "odd bytes": (
        RNG.integers(0, 255, (ROWS, 3), "u1"),
        {"chunks": (5, 3), "fletcher32": True, "shuffle": True},
        "direct: ",
    ),
    "zstd": (FLOATS, {**WHOLE, **hdf5plugin.Zstd()}, "direct: chunks of 4 rows, zstd"),
    "zstd, shuffle": (FLOATS, {**CUT, **hdf5plugin.Zstd(), "shuffle": True}, "direct: "),
    "zstd, big": (FLOATS.astype(">f8"), {**CUT, **hdf5plugin.Zstd()}, "direct: "),
    "lzf": (FLOATS, {**WHOLE, "compression": "lzf"}, "h5py: its filter lzf"),
    "blosc2": (FLOATS, {**WHOLE, **hdf5plugin.Blosc2()}, "h5py: its filter blosc2"),
    "scaleoffset": (np.arange(ROWS), {"chunks": (9,), "scaleoffset": 0}, "h5py: its filter scaleoffset"),
    "filled": (None, {"shape": (ROWS, 2), "dtype": "i4", "chunks": (8, 2), "fillvalue": 7}, "h5py: a fill value"),
    "big": (FLOATS.astype(">f4"), {}, "direct: contiguous"),
    "big chunks": (FLOATS.astype(">f8"), WHOLE, "direct: chunks"),
    "big gzip": (FLOATS.astype(">u2"), {**CUT, "compression": "gzip"}, "direct: "),
    "complex": (FLOATS.astype("c8"), WHOLE, "direct: "),
    "flags": (FLOATS > 0, {}, "direct: contiguous"),
    "half": (FLOATS.astype("f2"), {}, "direct: contiguous"),
    "compound": (COMPOUND, {}, "direct: contiguous"),
    "compound gzip": (COMPOUND, {"chunks": (10,), "compression": "gzip"}, "direct: chunks of 10 rows, gzip"),
    "strings": (np.array([b"%d" % i for i in range(ROWS)], "S4"), {}, "direct: contiguous"),
    "utf-8": (
        np.array([f"é{i}".encode() for i in range(ROWS)], h5py.string_dtype("utf-8", 6)),
        {"chunks": (9,)},
        "direct: ",
    ),
    "any length": (np.array(["a" * i for i in range(ROWS)], object), {"dtype": h5py.string_dtype()}, "h5py: its type"),
}


def store(file, name, data, how):
    if data is None:
        file.create_dataset(name, **how)[3] = 1
    elif how.get("maxshape"):  # in several steps, so that chunks do not lie in order
        made = file.create_dataset(name, (1, *data.shape[1:]), data.dtype, **how)
        made.resize(data.shape)
        made[ROWS // 2 :] = data[ROWS // 2 :]
        made[: ROWS // 2] = data[: ROWS // 2]
    else:
        file.create_dataset(name, data=data, **how)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a file of all kinds, one with a user block, and a virtual and an external dataset."""
    folder = tmp_path_factory.mktemp("read")
    for name, block in (("plain.h5", 0), ("block.h5", 1024)):
        with h5py.File(folder / name, "w", userblock_size=block) as f:
            for each, (data, how, _) in STORED.items():
                store(f, each, data, how)
    with h5py.File(folder / "raw.h5", "w") as f:
        half = FLOATS.nbytes // 2 + 1
        parts = [(str(folder / "a.raw"), 5, half), (str(folder / "b.raw"), 0, FLOATS.nbytes - half)]
        f.create_dataset("x", data=FLOATS, external=parts)
    with h5py.File(folder / "links.h5", "w") as f:
        for each in STORED:
            f[each] = h5py.ExternalLink("plain.h5", each)
    return folder


def read(path, name, rows):
    """Read the rows in batches of a dataset, and check that they equal those of h5py bit by bit."""
    with h5py.File(path, "r") as f:
        expected = f[name][:]
    source = Dataset.from_hdf5(path, name).definition.source
    found = source.read(np.array(rows, np.int64))
    same_bits(found, expected[rows])


def same_bits(found, expected):
    assert found.shape == expected.shape
    if expected.dtype.hasobject:
        assert found.tolist() == expected.tolist()
        return
    expected = expected.astype(expected.dtype.newbyteorder("="))
    assert found.dtype == expected.dtype
    assert found.tobytes() == expected.tobytes()


SELECTIONS = st.one_of(
    st.lists(st.integers(0, ROWS - 1), max_size=40),
    st.tuples(st.integers(0, ROWS - 1), st.integers(0, ROWS)).map(lambda x: list(range(x[0], max(x)))),
    st.permutations(range(ROWS)),
)
FEW = settings(derandomize=True, database=None, deadline=None, max_examples=12)


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("file", core(["plain.h5", "block.h5", "links.h5"], "links.h5"))
@FEW
@given(rows=SELECTIONS)
def test_bits(folder, file, name, rows):
    read(folder / file, name, rows)


@pytest.mark.parametrize("compression", [None, "gzip", "lzf"])
@pytest.mark.parametrize("inner", [">i2", [("v", ">i2", (2,))]])
def test_array_types_of_the_other_byte_order(tmp_path, compression, inner):
    # NumPy reports both dtypes as native
    kind = np.dtype((inner, (2, 3))) if isinstance(inner, str) else np.dtype(inner)
    with h5py.File(tmp_path / "a.h5", "w") as f:
        dataset = f.create_dataset("x", (9,), kind, chunks=(4,), compression=compression)
        values = np.arange(9 * 6, dtype="i2").reshape(9, 2, 3)
        dataset[...] = values if isinstance(inner, str) else [(row[0, :2],) for row in values]
    read(tmp_path / "a.h5", "x", [8, 0, 5, 4])
    read(tmp_path / "a.h5", "x", list(range(9)))


@pytest.mark.parametrize("name", STORED)
def test_way_of_reading(folder, name):
    for file in ("plain.h5", "block.h5", "links.h5"):
        (column,) = describe(str(folder / file), [name]).columns
        assert way_of_reading(column).startswith(STORED[name][2])


@FEW
@given(rows=SELECTIONS)
def test_external_storage(folder, rows):
    read(folder / "raw.h5", "x", rows)
    (column,) = describe(str(folder / "raw.h5"), ["x"]).columns
    assert way_of_reading(column) == "direct: contiguous"
    assert [other.path for other in column.others] == ["a.raw", "b.raw"]


@settings(derandomize=True, database=None, deadline=None, max_examples=60)
@given(data=st.data())
def test_any_shape_and_chunk(tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    chunks = tuple(data.draw(st.integers(1, 11)) for _ in shape)
    values = np.arange(np.prod(shape), dtype=data.draw(st.sampled_from(["<i2", ">i4", "<f8"]))).reshape(shape)
    filters = data.draw(
        st.sampled_from([{}, {"compression": "gzip"}, {"shuffle": True}, {"fletcher32": True, "shuffle": True}])
    )
    path = tmp_path_factory.mktemp("shape") / "a.h5"
    with h5py.File(path, "w", userblock_size=data.draw(st.sampled_from([0, 512]))) as f:
        f.create_dataset("x", data=values, chunks=chunks, maxshape=(None,) * len(shape), **filters)
    read(path, "x", data.draw(st.lists(st.integers(0, shape[0] - 1), max_size=20)))


# --- virtual datasets ---------------------------------------------------------------------


@pytest.fixture
def sources(tmp_path):
    """Return three files of four rows, stored in different ways, and a function that makes a dataset of them."""
    for i, how in enumerate([{}, {"chunks": (3, 2), "compression": "gzip"}, {"chunks": (4, 1)}]):
        with h5py.File(tmp_path / f"s{i}.h5", "w") as f:
            f.create_dataset("x", data=np.arange(8.0).reshape(4, 2) + 10 * i, **how)

    def make(fill=(), dtype="f8", shape=(12, 2), **mapped):
        layout = h5py.VirtualLayout(shape, dtype)
        for i, (into, out_of) in mapped.items():
            source = h5py.VirtualSource(f"{i}.h5", "x", (4, 2))
            layout[into] = source if out_of is None else source[out_of]
        with h5py.File(tmp_path / "v.h5", "w") as f:
            f.create_virtual_dataset("v", layout, *fill)
        return tmp_path / "v.h5"

    return make


def way(path, name="v"):
    return way_of_reading(describe(str(path), [name]).columns[0])


def test_virtual_rows(sources):
    path = sources(s0=(np.s_[0:4], None), s1=(np.s_[8:12], None), s2=(np.s_[4:8], None))
    read(path, "v", list(range(12)))
    read(path, "v", [11, 3, 4, 4, 0, 8, 7])
    assert way(path).startswith("direct: virtual, of 3 sources: chunks of 3 rows, gzip; chunks of 4 rows; cont")
    path = sources(shape=(5, 2), s0=(np.s_[3:5], np.s_[1:3]), s1=(np.s_[0:3], np.s_[1:4]))
    read(path, "v", [0, 1, 2, 3, 4])
    assert way(path).startswith("direct: virtual")


@pytest.mark.parametrize(
    ("reason", "how"),
    [
        ("not whole rows", {"shape": (4, 4), "s0": (np.s_[:, :2], None), "s1": (np.s_[:, 2:], None)}),
        ("have gaps", {"shape": (4, 2), "s0": (np.s_[::2], np.s_[:2]), "s1": (np.s_[1::2], np.s_[2:])}),
        ("another type", {"shape": (4, 2), "dtype": "f4", "s0": (np.s_[:], None)}),
        ("a fill value", {"fill": (3,), "s0": (np.s_[:4], None)}),
    ],
)
def test_virtual_through_h5py(sources, reason, how):
    path = sources(**how)
    assert way(path).startswith("h5py: ")
    assert reason in way(path)
    read(path, "v", [3, 0, 1])


@pytest.mark.parametrize("fill", [(), (3,)])
def test_virtual_with_a_gap_that_an_overlap_makes_up_for(sources, fill):
    # HDF5 counts elements only, and leaves the memory of the gap as it was
    gap = sources(fill, s0=(np.s_[0:4], None), s1=(np.s_[0:4], None), s2=(np.s_[4:8], None))
    with pytest.raises(DataFileError, match=r"v\.h5', dataset 'v': its sources overlap, and it has rows"):
        describe(str(gap), ["v"])
    whole = sources(shape=(6, 2), s0=(np.s_[0:4], None), s1=(np.s_[2:6], None))
    assert way(whole) == "h5py: its sources overlap"
    read(whole, "v", [5, 0, 3, 2])


@pytest.mark.parametrize(("step", "lengths"), [(1, (10, 10)), (1, (10, 7)), (3, (10, 7)), (3, (9, 10))])
def test_virtual_of_sources_that_grow(tmp_path, step, lengths):
    endless = h5py.h5s.UNLIMITED
    layout = h5py.VirtualLayout((9, 2), "i4", maxshape=(None, 2))
    for i, length in enumerate(lengths):
        with h5py.File(tmp_path / f"{i}.h5", "w") as f:
            f.create_dataset("x", data=np.arange(length, dtype="i4") + 1, maxshape=(None,), chunks=(4,))
        source = h5py.VirtualSource(f"{i}.h5", "x", (10,), maxshape=(None,))
        layout[0:endless:step, i] = source[0:endless:step]
    with h5py.File(tmp_path / "v.h5", "w", libver="latest") as f:
        f.create_virtual_dataset("v", layout)
    if step > 1 or lengths[0] != lengths[1]:  # rows without a source
        with pytest.raises(DataFileError, match="rows without a source"):
            describe(str(tmp_path / "v.h5"), ["v"])
    else:
        read(tmp_path / "v.h5", "v", [9, 0, 4])


def test_virtual_of_virtual_and_own_rows(sources, tmp_path):
    sources(shape=(8, 2), s0=(np.s_[0:4], None), s1=(np.s_[4:8], None))
    layout = h5py.VirtualLayout((10, 2), "f8")
    with h5py.File(tmp_path / "w.h5", "w") as f:
        f["own"] = np.full((2, 2), -1.0)
        layout[:8] = h5py.VirtualSource("v.h5", "v", (8, 2))
        layout[8:] = h5py.VirtualSource(f["own"])
        f.create_virtual_dataset("v", layout)
    read(tmp_path / "w.h5", "v", [9, 0, 5, 8, 4, 3])
    assert way(tmp_path / "w.h5").startswith("direct: virtual")


def numbered(path, pattern):
    """Return a virtual dataset of all files that match a pattern."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    space = h5py.h5s.create_simple((12, 2), (h5py.h5s.UNLIMITED, 2))
    space.select_hyperslab((0, 0), (h5py.h5s.UNLIMITED, 1), (4, 2), (4, 2))
    plist.set_virtual(space, pattern, b"x", h5py.h5s.create_simple((4, 2)))
    with h5py.File(path, "w") as f:
        whole = h5py.h5s.create_simple((12, 2), (h5py.h5s.UNLIMITED, 2))
        h5py.h5d.create(f.id, b"v", h5py.h5t.IEEE_F64LE, whole, plist)


def test_virtual_of_numbered_files(sources, tmp_path):
    numbered(tmp_path / "n.h5", b"s%b.h5")
    read(tmp_path / "n.h5", "v", [11, 0, 4, 5])
    assert way(tmp_path / "n.h5").startswith("direct: virtual, of 3")


def test_json_of_a_record(folder, sources):
    path = sources(s0=(np.s_[0:4], None), s1=(np.s_[8:12], None), s2=(np.s_[4:8], None))
    for record in (
        describe(str(folder / "block.h5"), list(STORED)),
        describe(str(folder / "raw.h5"), ["x"]),
        describe(str(path), ["v"]),
    ):
        text = json.dumps(to_json(record))
        again = from_json(json.loads(text))
        assert json.dumps(to_json(again)) == text
        assert [column.dtype for column in again.columns] == [column.dtype for column in record.columns]
        assert [column.stored for column in again.columns] == [column.stored for column in record.columns]
        assert from_json(to_json(again)).rows == record.rows
    for wrong in ({}, [], {"kind": "FileRecord"}, {"kind": "nothing"}, {"kind": "Part", "first": 1}):
        with pytest.raises(ValueError, match="not a record"):
            from_json(wrong)


@settings(derandomize=True, database=None, deadline=None)
@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=30), gaps=st.data())
def test_places_of_chunks(sizes, gaps):
    sizes = np.array(sizes, np.int64)
    skipped = np.array([gaps.draw(st.sampled_from([0, 0, 0, 16, -300])) for _ in sizes], np.int64)
    offsets = 1000 + np.cumsum(sizes + skipped)
    index = Chunked.of(0, (1,), (), offsets, sizes, np.zeros(len(sizes), np.uint32))
    assert [x.tolist() for x in index.places()] == [offsets.tolist(), sizes.tolist()]


@given(data=st.binary(max_size=300), times=st.sampled_from([1, 300]))
@settings(derandomize=True, database=None, deadline=None)
def test_fletcher32(data, times):
    low = high = 0
    data = data * times
    for i in range(0, len(data), 2):
        low = (low + int.from_bytes(data[i : i + 2].ljust(2, b"\0"), "big")) % 65535
        high = (high + low) % 65535
    if any(data):
        low, high = low or 65535, high or 65535
    assert fletcher32(data) == high << 16 | low


@settings(derandomize=True, database=None, deadline=None, max_examples=60)
@given(
    rows=st.lists(st.integers(0, 30), unique=True, min_size=1, max_size=20).map(sorted),
    row_bytes=st.sampled_from([7, 2048, 5000]),
    runs=st.booleans(),
    data=st.data(),
)
def test_scatter(tmp_path_factory, rows, row_bytes, runs, data):
    """Neighbours in the file, in memory, in both, and with gaps of all sizes between them."""
    content = np.random.default_rng(0).integers(0, 256, (31, row_bytes), np.uint8)
    path = tmp_path_factory.mktemp("scatter") / "a"
    path.write_bytes(content.tobytes())
    order = list(range(len(rows))) if runs else data.draw(st.permutations(range(len(rows))))
    out = np.zeros((len(rows), row_bytes), np.uint8)
    file = Descriptor(str(path), path.stat().st_size)
    try:
        scatter(file, np.array(rows) * row_bytes, row_bytes, out, np.array(order))
    finally:
        file.close()
    np.testing.assert_array_equal(out[order], content[rows])


@pytest.mark.parametrize("options", [{"scaleoffset": 0}, {"compression": "lzf"}, {"compression": "gzip"}, {}], ids=str)
@pytest.mark.parametrize("dtype", core(["i4", ">i4"], ">i4"))
def test_chunks_that_were_not_written_and_are_not_filled(tmp_path, dtype, options):
    """HDF5 leaves the memory of the reader as it is there, whatever the fill value; h5py gives zeros."""
    expected = np.array([[7] * 4] * 30 + [[0] * 4] * 31, dtype)
    not_filled = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    not_filled.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    not_filled.set_fill_value(np.array(1, dtype))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = file.create_dataset("x", (61, 4), dtype, chunks=(30, 4), dcpl=not_filled, **options)
        if made.id.get_create_plist().get_fill_time() != h5py.h5d.FILL_TIME_NEVER:
            pytest.skip("this version of h5py has HDF5 fill all chunks")
        made[:30] = 7
    for turn in range(40):
        dirty = [np.full(480 * (1 + each % 8), turn + 1, np.uint8) for each in range(200)]
        del dirty
        np.testing.assert_array_equal([*Dataset.from_hdf5(tmp_path / "a.h5", "x")], expected)
