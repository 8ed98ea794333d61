"""Tests of the boxes of a dataset: their bytes in a file, and the check over the boxes of all ranks."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.storage.layout import Box, read_box, require_cover, runs, write_box


@st.composite
def boxes(draw):
    whole = draw(st.lists(st.integers(0, 5), max_size=4))
    offset = [draw(st.integers(0, n)) for n in whole]
    return whole, offset, [draw(st.integers(0, n - o)) for n, o in zip(whole, offset, strict=True)]


@given(boxes(), st.sampled_from(["f4", "i8", "?", "c16"]), st.booleans())
def test_a_box_lies_where_numpy_says(tmp_path_factory, box, dtype, transposed):
    whole, offset, shape = box
    want = np.zeros(whole, dtype)
    values = np.arange(1, np.prod(shape, dtype=int) + 1).reshape(shape[::-1]).T.astype(dtype)
    values = values if transposed else np.asarray(values, order="C")
    where = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
    want[where] = values
    path = tmp_path_factory.mktemp("box") / "f"
    path.write_bytes(b"head" + bytes(want.nbytes))
    with open(path, "r+b", buffering=0) as file:
        write_box(file.fileno(), values, offset, whole, 4)
        assert path.read_bytes() == b"head" + want.tobytes()
        back = np.empty(shape, dtype)
        assert read_box(file.fileno(), back, offset, whole, 4)
        np.testing.assert_array_equal(back, values, strict=True)
        file.truncate(4)
        assert read_box(file.fileno(), back, offset, whole, 4) == (back.size == 0)


@pytest.mark.parametrize(
    ("offset", "shape", "whole", "calls"),
    [((2, 0), (3, 4), (9, 4), 1), ((2, 0), (3, 2), (9, 4), 3), ((1, 1, 0), (1, 2, 3), (2, 4, 3), 1), ((), (), (), 1)],
)
def test_what_follows_in_the_file_is_one_call(offset, shape, whole, calls):
    count, starts = runs(offset, shape, whole)
    assert (len(starts), count * len(starts)) == (calls, int(np.prod(shape)))


@given(boxes(), st.data())
def test_boxes_of_all_ranks_cover_the_array_once(box, data):
    whole, _, _ = box
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))}) for n in whole]
    grid = [
        Box(tuple(low for low, _ in each), tuple(high - low for low, high in each))
        for each in itertools.product(*(itertools.pairwise(cut) for cut in cuts))
    ]
    one_each = [[each] for each in data.draw(st.permutations(grid))]
    require_cover("u", one_each or [[Box((0,) * len(whole), tuple(whole))]], tuple(whole))
    if not whole or 0 in whole:
        return
    lost = data.draw(st.sampled_from(grid))
    with pytest.raises(ValueError, match=r"'u': the blocks of all .* ranks have"):
        require_cover(
            "u", [[Box(each.offset, each.shape if each != lost else (0,) * len(whole))] for each in grid], tuple(whole)
        )
    with pytest.raises(ValueError, match=r"'u': the blocks of rank \d+ .* and rank \d+ .* overlap"):
        require_cover("u", [grid, [lost]], tuple(whole))
