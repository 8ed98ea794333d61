"""The division of the arrays of a checkpoint over ranks, and what a reader makes of a table of boxes that is wrong."""

import contextlib

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.data import Block, ChecksumError, DataFileError
from mpistrat.storage import layout
from mpistrat.storage.layout import Box, NewArray, checksum, parts_of_ranks, piece_of
from mpistrat.training.checkpoint.read import read
from mpistrat.training.checkpoint.write import NewCheckpoint, write
from tests.selection import core

SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@pytest.fixture(scope="module", autouse=True)
def small_pieces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "_PIECE", 512)
        patch.setattr(layout, "_SMALL", 100)
        yield


@given(
    st.lists(st.tuples(st.sampled_from(["f4", "S3", "c16"]), SHAPES), min_size=1, max_size=6),
    st.sets(st.integers(1, 5)),
)
def test_each_byte_has_one_writer(arrays, writers):
    new = {str(i): NewArray(np.dtype(dtype), shape) for i, (dtype, shape) in enumerate(arrays)}
    writers = [0, *sorted(writers)]
    shares = parts_of_ranks(new, writers, 6)
    assert {*shares} == {*range(6)}
    assert {rank for rank, parts in shares.items() if parts} <= {*writers}
    piece, total = piece_of(new), sum(array.nbytes for array in new.values())
    for name, array in new.items():
        parts = [part for rank in writers for part in shares[rank] if part.name == name]
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
        assert parts[-1].stop == array.nbytes
        assert all(part.start % piece == 0 for part in parts)
    for parts in shares.values():
        large = sum(part.stop - part.start for part in parts if new[part.name].nbytes >= layout._SMALL)
        assert large <= total / len(writers) + piece


@pytest.mark.full
@settings(max_examples=50)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=4), st.integers(0, 5), st.data())
def test_boxes_written_by_many_are_read_by_any(tmp_path_factory, lengths, columns, data):
    """Ranks with rows of any number write; a reader takes any box."""
    path = tmp_path_factory.mktemp("boxes") / "b.h5"
    starts = np.cumsum([0, *lengths]).tolist()
    whole = np.random.default_rng(1).normal(size=(starts[-1], columns)).astype(">f4")
    boxes = tuple((Box((low, 0), (n, columns)),) for low, n in zip(starts, lengths, strict=False))
    arrays = {"a/b": NewArray(whole.dtype, whole.shape, None, boxes), "n": NewArray(np.dtype("i8"), (), 0)}
    new = [
        NewCheckpoint(
            arrays,
            {"n": np.array(7), "a/b": [Block(whole[low : low + n], (low, 0), whole.shape)]},
            path,
            rank,
            size=len(lengths),
        )
        for rank, (low, n) in enumerate(zip(starts, lengths, strict=False))
    ]
    with contextlib.closing(new[0]):
        new[0].make(path)
        places = new[0].lay_out()
        new[0].finish(path, [each.write(path, places)[0] for each in new])
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["a/b"][()], whole, strict=True)
    low = data.draw(st.integers(0, starts[-1]))
    high, right = data.draw(st.integers(low, starts[-1])), data.draw(st.integers(0, columns))
    for dtype in ("f4", ">f4"):
        found = np.full((high - low, columns - right), -1, dtype)
        read({}, path, [("a/b", Box((low, right), whole.shape), found)])
        np.testing.assert_array_equal(found, whole[low:high, right:])


@pytest.mark.parametrize("dtype", core(["f4", "S3"], "f4"))
@pytest.mark.parametrize("chunks", [False, True])
@settings(max_examples=25)  # of each of the four
@given(data=st.data())
def test_a_box_reads_its_pieces_only(tmp_path_factory, dtype, chunks, data):
    """What one rank saved as one array, in pieces with checksums of which the last is damaged."""
    path = tmp_path_factory.mktemp("pieces") / "a.h5"
    whole = np.arange(500).reshape(25, 20).astype(dtype)
    write({"a": whole}, path)
    with h5py.File(path, "r+") as file:
        if chunks:  # stored anew by another program
            attributes = dict(file["a"].attrs)
            del file["a"]
            file.create_dataset("a", data=whole, chunks=(7, 7)).attrs.update(attributes)
    low, left = data.draw(st.integers(0, 24)), data.draw(st.integers(0, 19))
    high, right = data.draw(st.integers(low, 25)), data.draw(st.integers(left, 20))
    box, found = Box((low, left), whole.shape), np.zeros((high - low, right - left), dtype)
    read({}, path, [("a", box, found), ("a", box, found)])
    np.testing.assert_array_equal(found, whole[low:high, left:right])
    with h5py.File(path, "r+") as file:
        file["a"][-1, -1] = 0
    last = (500 * whole.itemsize - 1) // 512 * 512 // whole.itemsize  # the first element of the last piece
    if dtype == "f4" and not chunks and found.size and (high - 1) * 20 + right <= last:
        read({}, path, [("a", box, found)])
        np.testing.assert_array_equal(found, whole[low:high, left:right])
    elif found.size:
        with pytest.raises(ChecksumError, match="dataset 'a'"):
            read({}, path, [("a", box, found)])


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([[0, 0, 5, 2, 0]], "its boxes are not inside of its shape"),
        ([[0, 0, 2, 2, 0]], "its boxes have 4 of the 8 elements to read"),
        ([[0, 0, 4]], "it has no place in the file, or no boxes"),
        ([[0, 2**63, 4, 2, 0]], "its boxes are not inside of its shape"),
        (7, "it has no place in the file, or no boxes"),
    ],
)
def test_a_table_of_boxes_that_is_wrong(tmp_path, rows, text):
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["a"] = np.zeros((4, 2))
        table = np.array(rows, np.uint64)
        file["__replicas__/boxes/a"] = table
        file["__replicas__/boxes/a"].attrs["checksums"] = np.array([checksum(table.tobytes(), "a")], np.uint64)
    with pytest.raises(DataFileError, match=f"dataset 'a': {text}"):
        read({"a": np.zeros((4, 2))}, tmp_path / "b.h5")
