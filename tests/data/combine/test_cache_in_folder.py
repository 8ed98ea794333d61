"""Tests of ``cache(folder)``: the rows of ``cache()``, made once for all programs, or an error."""

import collections
import functools
import operator
import os
import shutil
import signal
import subprocess
import sys

import h5py
import numpy as np
import pytest

from mpistrat import nest
from mpistrat.data import DataFileError, Dataset

Row = collections.namedtuple("Row", "image rest")


def lists(dataset):
    return [nest.map_structure(lambda x: np.asarray(x).tolist(), each) for each in dataset]


def row(x):
    return Row(np.full((2, 3), x, "float32"), {"a/b": x > 3, "c": [np.int16(x), np.bytes_(b"%02d" % x)]})


def numbers(made, stop=20):
    """Return a dataset that notes which rows it makes."""

    def note(x):
        made.append(int(x))
        return row(x)

    return Dataset.range(stop).map(note)


@pytest.mark.parametrize(
    "then",
    [
        lambda cached: cached.batch(6),
        lambda cached: cached.repeat(2).skip(3),
        lambda cached: cached.select([7, 0, -1]),
        lambda cached: cached[4:15:3],
        lambda cached: cached.window(3, shift=2),
        lambda cached: cached.enumerate().map(lambda number, row: (number, row.image)),
        lambda cached: Dataset.zip(cached, cached.skip(2)),
        lambda cached: cached.map(lambda row: row.image).cache().batch(7, drop_remainder=True),
    ],
)
def test_rows_are_those_of_a_cache_in_memory(tmp_path, then):
    expected = lists(then(Dataset.range(20).shuffle(seed=1).map(row).cache()))
    for _ in range(2):
        made = then(Dataset.range(20).shuffle(seed=1).map(row).cache(tmp_path / "kept"))
        assert len(made) == len(expected)
        assert lists(made) == lists(made) == expected


def test_later_programs_make_few_rows(tmp_path):
    first, later = [], []
    cached = numbers(first).cache(tmp_path)
    assert not first
    spec = cached.batch(4).element_spec
    assert {*first} == {*range(20)}
    again = numbers(later).cache(tmp_path).batch(4)
    assert again.element_spec == spec == Dataset.range(20).map(row).batch(4).element_spec
    assert lists(again) == lists(cached.batch(4))
    assert {*later} == {0, 2, 5, 8, 10, 13, 16, 19}


def test_each_epoch_is_shuffled(tmp_path):
    shuffled = Dataset.range(50).cache(tmp_path).shuffle(seed=3)
    one, other = lists(shuffled), lists(shuffled)
    assert one != other
    assert sorted(one) == sorted(other) == [*range(50)]


def test_the_order_of_a_shuffle_before_is_kept(tmp_path):
    orders = [lists(Dataset.range(50).shuffle().cache(tmp_path)) for _ in range(3)]
    assert orders[0] == orders[1] == orders[2] != [*range(50)]


def test_a_stream_gets_a_length(tmp_path):
    for _ in range(2):
        cached = Dataset.range(3000).filter(lambda x: x % 2 == 0).cache(tmp_path)
        assert len(cached) == 1500
        assert cached[-1] == 2998
        assert lists(cached) == [*range(0, 3000, 2)]


def write(path, values, time=None):
    with h5py.File(path, "w") as file:
        file["x"] = values
    if time:
        os.utime(path, (time, time))


def files(path):
    return Dataset.from_hdf5(str(path / "*.h5"), "x").map(abs)


def changed(path, number):
    write(path / f"{number}.h5", np.arange(4.0) + 1, 2e9)
    return files(path)


def renamed(path):
    (path / "2.h5").rename(path / "0a.h5")
    return files(path)


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (lambda path: files(path).skip(1), r"pipeline: .*, map, not .*, map, skip\(1\) \(and 1 more\)"),
        (lambda path: files(path).map(lambda x: x), "pipeline: "),
        (lambda path: Dataset.from_hdf5(str(path / "*.h5"), "x").map(lambda x: x), "functions: .*abs .*lambda"),
        (lambda path: changed(path, 1), r"file '.*1.h5' \(bytes, time in ns\) was \[\d+, \d+\] and is"),
        (lambda path: changed(path, 3), r"rows: 12, not 16 \(and 1 more\)"),
        (renamed, "file '.*0a.h5' .* was absent and is"),
    ],
)
def test_caches_of_other_rows_are_refused(tmp_path, other, match):
    for number in range(3):
        write(tmp_path / f"{number}.h5", np.arange(4.0))
    assert len(lists(files(tmp_path).cache(tmp_path / "kept"))) == 12
    with pytest.raises(ValueError, match=match):
        lists(other(tmp_path).cache(tmp_path / "kept"))


def scaled(factor):
    def helper(x):
        return x * factor

    return Dataset.range(5).map(lambda x: helper(x))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            lambda: Dataset.range(5).map(lambda x: x in {"a", "b"}),
            lambda: Dataset.range(5).map(lambda x: x in {"a", "c"}),
        ),
        (lambda: Dataset.range(9).filter(lambda x: x > 3), lambda: Dataset.range(9).filter(lambda x: x < 5)),
        (
            lambda: Dataset.range(9).filter(lambda x: x > 3, by=lambda x: x),
            lambda: Dataset.range(9).filter(lambda x: x < 5, by=lambda x: x),
        ),
    ],
)
def test_the_code_of_functions_is_compared(tmp_path, one, other):
    expected = lists(one().cache(tmp_path))
    assert lists(one().cache(tmp_path)) == expected
    with pytest.raises(ValueError, match="functions: "):
        lists(other().cache(tmp_path))


def first(v):
    return v >= 1


def second(v):
    return v <= 1


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor

    method = __call__


def values(*numbers):
    return np.array(numbers, float)


def generated(stop):
    yield from range(stop, stop + 4)


@pytest.mark.parametrize(
    "make",
    [
        lambda k: Dataset.from_arrays(values(1, 2, 3)).filter((first, second)[k]),
        scaled,
        lambda k: Dataset.range(4).map(Scaled(k)),
        lambda k: Dataset.range(4).map(Scaled(k).method),
        lambda k: Dataset.range(4).map(functools.partial(np.add, k)),
        lambda k: Dataset.range(4).map(functools.partial(np.full, (2,), dtype=("f4", "f8")[k])),
        lambda k: Dataset.range(4).map(functools.partial(operator.add, np.float64(k))),
        lambda k: Dataset.range(4).map(lambda x, m=[k]: x * m[0]),
        lambda k: Dataset.zip(Dataset.range(4), Dataset.from_arrays(values(k, 2, 3, 4))),
        lambda k: Dataset.from_arrays(values(k, 2, 3, 4)).enumerate(),
        lambda k: Dataset.from_arrays(values(k, 2, 3, 4)).cache(),
        lambda k: Dataset.from_sequence([k, 2, 3]),
        lambda k: Dataset.from_iterable([k, 2, 3]),
        lambda k: Dataset.from_generator(generated, args=(k,)),
        lambda k: Dataset.range(9).sample([k + 1, *range(8)], replacement=True, seed=1),
    ],
)
def test_rows_that_are_made_again_tell_what_no_record_does(tmp_path, make):
    expected = lists(make(0).cache(tmp_path))
    assert lists(make(0).cache(tmp_path)) == expected
    with pytest.raises(ValueError, match=r"(functions: |row [0-9] of this dataset is not the one)"):
        lists(make(1).cache(tmp_path))


def test_rows_that_differ_each_time_are_refused(tmp_path):
    random = np.random.default_rng(1)
    with pytest.raises(ValueError, match="draw at random"):
        lists(Dataset.range(4).map(lambda x: x + random.random()).cache(tmp_path))


def test_what_cannot_be_kept_is_named(tmp_path):
    with pytest.raises(ValueError, match="no rows"):
        lists(Dataset.range(0).cache(tmp_path))
    with pytest.raises(TypeError, match="have none"):
        lists(Dataset.range(3).map(lambda x: {}).cache(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="is a file"):
        lists(Dataset.range(3).cache(tmp_path / "file"))
    lists(Dataset.range(3).cache(tmp_path / "kept"))
    (tmp_path / "kept" / "cache.json").write_text('{"version": 7}')
    with pytest.raises(ValueError, match="version: 7, not"):
        lists(Dataset.range(3).cache(tmp_path / "kept"))


def test_a_state_stays_good_where_files_are_copied_and_the_cache_is_made_again(tmp_path):
    np.save(tmp_path / "a.npy", values(*range(10)))

    def cached():
        return Dataset.from_npy(tmp_path / "a.npy").cache(tmp_path / "kept").shuffle(seed=1).batch(3)

    def identity():
        return cached()._definition.described()

    cached().element_spec  # noqa: B018
    before = identity()
    os.utime(tmp_path / "a.npy", (1e9, 1e9))
    with pytest.raises(ValueError, match=r"a\.npy"):
        cached().element_spec  # noqa: B018
    shutil.rmtree(tmp_path / "kept")
    cached().element_spec  # noqa: B018
    assert str(identity()) == str(before)


def test_seeds_and_arrays_of_other_values_are_refused(tmp_path):
    lists(Dataset.from_arrays(np.arange(9)).shuffle(seed=1).cache(tmp_path))
    for other, match in (
        (Dataset.from_arrays(np.arange(1, 10)).shuffle(seed=1), "checksum: "),
        (Dataset.from_arrays(np.arange(9)).shuffle(seed=2), r"shuffle\(seed=1\), not .*shuffle\(seed=2\)"),
    ):
        with pytest.raises(ValueError, match=match):
            lists(other.cache(tmp_path))


@pytest.mark.parametrize(
    ("fn", "error", "match"),
    [
        (lambda x: {"name": f"{x}"}, TypeError, "array '0 name' of an element has <U1"),
        (lambda x: {"t": np.datetime64(int(x), "s")}, TypeError, "'0 t': HDF5 has no type for datetime64"),
        (lambda x: np.zeros(int(x)), ValueError, "equal shapes"),
        (lambda x: x if x < 2 else x / 2, TypeError, "float64 in a column of int64"),
    ],
)
def test_rows_that_cannot_be_kept_are_refused(tmp_path, fn, error, match):
    for _ in range(2):
        with pytest.raises(error, match=match):
            lists(Dataset.range(4).map(fn).cache(tmp_path))
    assert not [*tmp_path.glob("*.json")]


KILLED = """
import os, signal, sys
from mpistrat.data import Dataset

def one(x):
    if x == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return x

list(Dataset.range(20).map(one).cache(sys.argv[1]))
"""


@pytest.mark.parametrize("at", [3, 19])
def test_what_a_killed_program_left_is_written_anew(tmp_path, at):
    ended = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "kept", str(at)], check=False)
    assert ended.returncode == -signal.SIGKILL
    made = []
    assert lists(numbers(made).cache(tmp_path / "kept")) == lists(numbers([]))
    assert {*made} == {*range(20)}


def test_lost_rows_are_made_again_and_damage_is_named(tmp_path):
    expected = lists(Dataset.range(9).cache(tmp_path))
    (rows,) = tmp_path.glob("*.h5")
    rows.unlink()
    assert lists(Dataset.range(9).cache(tmp_path)) == expected
    (tmp_path / "cache.json").write_text("[1, 2")
    with pytest.raises(DataFileError, match=r"cache\.json"):
        lists(Dataset.range(9).cache(tmp_path))
