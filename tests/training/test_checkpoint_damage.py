"""No change of the bytes of a checkpoint gives other values: it is refused, or the values are right."""

import struct

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mpistrat
from mpistrat.data import ChecksumError, DataFileError
from mpistrat.storage import layout
from mpistrat.training import load, save
from mpistrat.training.checkpoint.read import read
from mpistrat.training.checkpoint.write import write

# Two of one shape and type: the one must not be taken for the other.
VALUES = {"a": np.arange(1.0, 1537.0), "b": np.arange(5001.0, 6537.0), "group/c": np.arange(7, dtype="i2")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a file with several pieces for each array, and where each array lies."""
    path = tmp_path_factory.mktemp("checkpoint") / "v.h5"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "_PIECE", 4096)
        write(VALUES, path)
    with h5py.File(path) as file:
        places = {
            name: range(file[name].id.get_offset(), file[name].id.get_offset() + value.nbytes)
            for name, value in VALUES.items()
        }
    return path.read_bytes(), places


def exchanged(data, one, other, size):
    first, second = bytes(data[one : one + size]), bytes(data[other : other + size])
    data[one : one + size], data[other : other + size] = second, first


@st.composite
def damage(draw, length):
    """A function that changes bytes in place, as disks, copies and faulty memory do."""
    kind = draw(st.sampled_from(["flip", "exchange", "cancel", "move", "cut", "zero"]))
    size = draw(st.sampled_from([8, 64, 512, 4096]))
    units = st.integers(0, length // size - 1).map(lambda unit: unit * size)
    one, other, bit = draw(units), draw(units), draw(st.integers(0, 8 * size - 1))

    def apply(data):
        if kind == "flip":
            data[one + bit // 8] ^= 1 << bit % 8
        elif kind == "exchange":
            exchanged(data, one, other, size)
        elif kind == "cancel":
            for place, sign in ((one, 1), (other, -1)):
                (word,) = struct.unpack_from("<Q", data, place)
                struct.pack_into("<Q", data, place, (word + sign * (bit + 1)) % 2**64)
        elif kind == "move":
            data[other : other + size] = bytes(data[one : one + size])
        elif kind == "zero":
            data[one : one + size] = bytes(size)
        else:
            del data[one + bit // 8 :]

    return apply


@pytest.mark.full
@settings(
    max_examples=600, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_damage_anywhere_is_refused_or_harmless(whole, tmp_path, draw):
    before, places = whole
    changed = bytearray(before)
    for _ in range(draw.draw(st.integers(1, 2))):
        if len(changed) >= 4096:
            draw.draw(damage(len(changed)))(changed)
    path = tmp_path / "spoilt.h5"
    path.write_bytes(changed)
    for name, value in VALUES.items():
        found = {name: np.full_like(value, -1)}
        spoilt = bytes(changed[places[name].start : places[name].stop]) != value.tobytes()
        try:
            read(found, path)
        except DataFileError as error:
            assert "spoilt.h5" in str(error)  # noqa: PT017 - or nothing is raised
        except ValueError as error:
            assert str(path) in str(error)  # noqa: PT017
            assert repr(name) in str(error)  # noqa: PT017
        else:
            assert not spoilt
            np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize("size", [8, 64, 512, 4096])
def test_bytes_that_change_places_are_named(whole, tmp_path, size):
    before, places = whole
    for one, other in ((0, 1), (0, 2), (1, 2)):
        changed = bytearray(before)
        exchanged(changed, places["a"].start + one * size, places["a"].start + other * size, size)
        (tmp_path / "v.h5").write_bytes(changed)
        with pytest.raises(ChecksumError, match=r"v\.h5', dataset 'a': bytes \d+ to \d+ are not those"):
            read({"a": VALUES["a"].copy()}, tmp_path / "v.h5")
        read({"b": VALUES["b"].copy()}, tmp_path / "v.h5")


def test_a_variable_under_the_name_of_another_is_refused(whole, tmp_path):
    (tmp_path / "v.h5").write_bytes(whole[0])
    with h5py.File(tmp_path / "v.h5", "r+") as file:
        file.move("a", "c")
        file.move("b", "a")
    with pytest.raises(ChecksumError, match=r"dataset 'a': .* under this name"):
        read({"a": VALUES["a"].copy()}, tmp_path / "v.h5")


def test_any_spelling_of_a_name(tmp_path):
    with mpistrat.get_strategy().scope():
        v = mpistrat.Variable([1.0, 2.0])
    save({"/group//./v": v}, tmp_path / "v.h5")
    v.assign([0.0, 0.0])
    load({"group/v": v}, tmp_path / "v.h5")
    assert v.read_value().tolist() == [1.0, 2.0]


def test_a_checksum_of_a_later_version_is_named(whole, tmp_path):
    (tmp_path / "v.h5").write_bytes(whole[0])
    with h5py.File(tmp_path / "v.h5", "r+") as file:
        file.attrs["checksum"] = np.bytes_("blake9")
    with pytest.raises(DataFileError, match="of the kind 'blake9', which this version does not know"):
        read({"a": VALUES["a"].copy()}, tmp_path / "v.h5")
