"""Arrays come back from JSON as they were, and nothing else does."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from mpistrat.arrays.json_arrays import packed, unpacked

NUMBERS = st.one_of(
    arrays_of.boolean_dtypes(),
    arrays_of.integer_dtypes(endianness="?"),
    arrays_of.unsigned_integer_dtypes(endianness="?"),
    arrays_of.floating_dtypes(endianness="?"),
    arrays_of.complex_number_dtypes(endianness="?"),
)


@given(arrays_of.arrays(NUMBERS, arrays_of.array_shapes(min_dims=0, min_side=0)))
def test_arrays_come_back(array):
    for one in (array, array.T, array[..., ::-1] if array.ndim else array):
        again = unpacked(json.loads(json.dumps(packed(one))))
        assert type(again) is np.ndarray
        assert again.flags.writeable
        assert (again.dtype, again.shape, again.tobytes()) == (one.dtype, one.shape, one.tobytes())


def test_numbers_come_back_as_numbers():
    again = unpacked(packed(np.float32(0.1)))
    assert type(again) is np.float32
    assert again == np.float32(0.1)


@pytest.mark.parametrize("wrong", [["a"], [None], np.array("2026", "M8[s]")])
def test_other_arrays_are_refused(wrong):
    with pytest.raises(TypeError, match="arrays of numbers"):
        packed(np.asarray(wrong))


@pytest.mark.parametrize(
    "change",
    [{"array": "AD*wAQ=="}, {"array": 3}, {"dtype": "O"}, {"dtype": "f3"}, {"dtype": "M8[s]"}, {"shape": [3]},
     {"shape": [1 << 70]}, {"shape": "x"}, {"array": "", "shape": None}],
)  # fmt: skip
def test_damaged_texts_are_refused(change):
    with pytest.raises(ValueError):
        unpacked({**packed(np.array([1.0, 2.0], np.float16)), **change})
    missing = packed(np.zeros(2))
    del missing[next(iter(change))]
    with pytest.raises(ValueError):
        unpacked(missing)
