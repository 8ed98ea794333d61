"""Values come to the host and go back as what they were."""

import array

import ml_dtypes
import numpy as np
import pytest

from mpistrat.arrays.arrays import from_host, to_host


class Foreign:
    """As much of another library's array as the exchange of arrays needs."""

    def __init__(self, array, device=1):
        self.array, self.kind, self.moves = array, device, 0

    def __dlpack__(self, **options):
        if self.kind not in (1, 3, 11):
            raise BufferError("not on the host")
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return (self.kind, 0)

    def __array__(self, dtype=None, copy=None):
        return np.array(self.array, dtype=dtype)


def test_arrays_are_not_copied():
    for value in (np.ones(3), np.ones((2, 3), order="F"), np.ones(6)[::2], np.ones(2, ">f4"), np.empty(0)):
        assert to_host(value) is value
    value = Foreign(np.arange(3.0))
    assert np.shares_memory(to_host(value), value.array)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1, np.int64),
        (1.5, np.float64),
        (1j, np.complex128),
        (True, np.bool_),
        (np.float16(1), np.float16),
        (np.array(1.0, np.float32), np.float32),
        (ml_dtypes.bfloat16(1), ml_dtypes.bfloat16),
        ([1, 2], np.int64),
        (array.array("f", [1.0]), np.float32),
        (b"abc", np.dtype("S3")),
    ],
)
def test_dtypes(value, dtype):
    host = to_host(value)
    assert type(host) is np.ndarray
    assert host.dtype == dtype
    assert host.shape == np.shape(value)


@pytest.mark.parametrize("value", [None, object(), {1, 2}, {"a": 1}, len, [None]])
def test_what_is_no_array(value):
    with pytest.raises(TypeError):
        to_host(value)


def test_ragged_lists_are_no_arrays():
    with pytest.raises((TypeError, ValueError)):
        to_host([[1], [2, 3]])


def test_masked_arrays_are_refused():
    for value in (np.ma.masked_array([1, 2], [0, 1]), np.ma.masked):
        with pytest.raises(TypeError, match="masked"):
            to_host(value)


def test_numbers_go_back_as_numbers():
    for like in (1, 1.0, 1j, np.float32(1), np.int8(1)):
        back = from_host(np.array(5.0), like)
        assert isinstance(back, np.generic)
        assert back == 5
    result = np.array(5.0)
    assert from_host(result, np.array(1.0)) is result
    assert from_host(result, [1.0]) is result


def test_dtypes_that_dlpack_has_no_word_for():
    value = Foreign(np.ones(3, ml_dtypes.bfloat16))
    assert to_host(value).dtype == ml_dtypes.bfloat16


def test_subclasses_of_arrays_become_arrays():
    class Derived(np.ndarray):
        pass

    value = np.ones(3).view(Derived)
    assert type(to_host(value)) is np.ndarray
    assert np.shares_memory(to_host(value), value)


def test_strict_library_keeps_its_arrays():
    xp = pytest.importorskip("array_api_strict")
    value = xp.asarray([1.0, 2.0])
    host = to_host(value)
    np.testing.assert_array_equal(host, [1, 2])
    back = from_host(host * 2, value)
    assert type(back) is type(value)
    assert back.device == value.device
