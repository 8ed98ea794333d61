"""Tests of blocks, what each rank holds of an array, and of the boxes of its flat elements."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.data import Block
from mpistrat.data.write.blocks import boxes_of
from mpistrat.storage.layout import runs


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_flat_elements_are_boxes(shape, data):
    """In their order, each one run of the file, and no more than two for each axis."""
    size = int(np.prod(shape))
    first = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(first, size))
    found = list(boxes_of(first, stop, tuple(shape)))
    flat = np.arange(size).reshape(shape)
    parts = [flat[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].reshape(-1) for box in found]
    assert np.concatenate([[], *parts]).tolist() == list(range(first, stop))
    assert all(len(runs(*box, shape)[1]) == 1 for box in found)
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_a_block_knows_its_box():
    block = Block([[1.0, 2.0]], np.array([3, 0]), [4, 2])
    assert repr(block) == "<Block float64 [3:4, 0:2] of (4, 2)>"
    assert (block.offset, block.global_shape, block.shape) == ((3, 0), (4, 2), (1, 2))
    with pytest.raises(AttributeError, match="make another one with another offset"):
        block.offset = (0, 0)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((np.zeros(2), (0, 0), (2, 2)), ValueError, "of 1 axes needs as many numbers"),
        ((np.zeros(2), (1,), (2,)), ValueError, r"shape \(2,\) at \(1,\) is not inside of the global shape \(2,\)"),
        ((np.zeros(2), (-1,), (2,)), ValueError, "is not inside"),
        ((np.zeros(2), 0, (2,)), TypeError, "offset must be a sequence of integers, not 0"),
        ((np.zeros(2), (0,), (2.0,)), TypeError, "global_shape must be a sequence of integers"),
        ((np.ma.zeros(2), (0,), (2,)), TypeError, "masked"),
    ],
)
def test_wrong_blocks_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        Block(*arguments)
