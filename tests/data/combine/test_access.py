"""Tests of elements that are taken by number: selections, parts, draws and windows, in any pipeline."""

import collections
import itertools
import pickle

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat import nest
from mpistrat.data import Dataset
from tests.data.distribute.test_state import Files, batches, divided, flat, joined

MANY = settings(derandomize=True, database=None, deadline=None, max_examples=25)
LENGTHS = st.lists(st.integers(0, 30), min_size=2, max_size=9).filter(lambda each: sum(each) > 3)


def lists(dataset):
    return [nest.map_structure(lambda x: np.asarray(x).tolist(), each) for each in dataset]


@MANY
@given(st.data())
def test_indices_and_slices_are_those_of_a_list(data):
    dataset = Dataset.range(100, 111)
    if data.draw(st.booleans()):
        dataset = dataset.shuffle(seed=1).map(lambda x: x + 1)
    if data.draw(st.booleans()):
        dataset = dataset.batch(3)
    expected = lists(dataset)
    bound = st.none() | st.integers(-15, 15)
    cut = slice(data.draw(bound), data.draw(bound), data.draw(bound.filter(lambda x: x != 0)))
    assert lists(dataset.with_options(dataset.options())[cut]) == expected[cut]
    for index in (0, -1, np.int64(len(expected) - 1), -len(expected)):
        assert np.asarray(dataset[index]).tolist() == expected[index]
    for index in (len(expected), -len(expected) - 1):
        with pytest.raises(IndexError, match=f"{index} is outside"):
            dataset[index]
    chosen = data.draw(st.lists(st.integers(-len(expected), len(expected) - 1)))
    selected = dataset.with_options(dataset.options()).select(chosen)
    assert len(selected) == len(chosen)
    assert lists(selected) == [expected[k] for k in chosen]


def test_what_has_no_number_is_refused():
    for wrong in (1.5, "x", [0, 1], None):
        with pytest.raises(TypeError, match="an integer or a slice"):
            Dataset.range(3)[wrong]
    endless, stream = Dataset.range(3).repeat(), Dataset.from_iterable(range(3))
    assert endless[7] == 1
    for wrong in (lambda: endless[-1], lambda: endless[1:], lambda: len(endless.select([0])), lambda: stream[0]):
        with pytest.raises((TypeError, ValueError), match=r"ends|beginning"):
            wrong()
    for call in (
        lambda d: d.select([0]),
        lambda d: d.split(0.5, 1),
        lambda d: d.k_folds(2, 1),
        lambda d: d.sample("x"),
    ):
        with pytest.raises(TypeError, match="only in order"):
            call(stream)
    with pytest.raises(IndexError, match="index 3"):
        len(Dataset.range(3).select([0, 3]))
    for wrong in ([0.5], "ab", [[1]]):
        with pytest.raises(TypeError, match="sequence of integers"):
            Dataset.range(3).select(wrong)


@MANY
@given(n=st.integers(4, 200), seed=st.integers(-5, 5), shares=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_parts_of_a_split_are_all_elements_once(n, seed, shares):
    fractions = [each / sum(shares) for each in shares]
    sizes = [n * each // sum(shares) for each in shares]
    sizes = [size + (k < n - sum(sizes)) for k, size in enumerate(sizes)]
    parts = Dataset.range(n).split(fractions, seed)
    if not all(sizes):
        with pytest.raises(ValueError, match="has no elements"):
            [len(part) for part in parts]
        return
    assert [len(part) for part in parts] == sizes
    assert sorted(x for part in parts for x in lists(part)) == [*range(n)]
    assert all(lists(part) == sorted(lists(part)) for part in parts)
    again = Dataset.range(n).map(lambda x: x).split(fractions, seed)
    assert [*map(lists, again)] == [*map(lists, parts)] == [*map(lists, pickle.loads(pickle.dumps(parts)))]


def test_splits_depend_on_the_seed_alone():
    splits = [lists(Dataset.range(50).split(0.7, seed)[0]) for seed in (1, 2)]
    assert splits[0] != splits[1]
    train, _ = Dataset.range(50).split(0.7, 1)
    assert lists(train) == lists(train) == splits[0]  # in each epoch
    assert sorted(lists(train.shuffle(seed=3).repeat(2))) == sorted(splits[0] * 2)
    assert [len(part) for part in Dataset.range(10).split(0.8, 1)] == [8, 2]


@MANY
@given(keys=st.lists(st.sampled_from("abcdefgh"), min_size=6, max_size=60), k=st.integers(2, 4), seed=st.integers(0, 9))
def test_equal_keys_stay_in_one_part(keys, k, seed):
    rows = Dataset.from_arrays({"x": np.arange(len(keys)), "key": np.array(keys)})
    pairs = rows.map(lambda row: (row["key"], row["x"]))
    ways = [
        (rows, "key", "x"),
        (rows, keys, "x"),
        (rows, lambda row: row["key"], "x"),
        (pairs, 0, 1),
        (pairs, lambda key, x: key, 1),
    ]
    found = []
    for dataset, by, x in ways:
        folds = dataset.k_folds(k, seed, by=by)
        try:
            found.append([[int(row[x]) for row in test] for _, test in folds])
        except ValueError:
            assert len(set(keys)) < 2 * k
            return
        assert all(len(train) + len(test) == len(keys) for train, test in folds)
    tests = found[0]
    assert found == [tests] * len(ways)
    assert sorted(x for part in tests for x in part) == [*range(len(keys))]
    of = {keys[x]: number for number, part in enumerate(tests) for x in part}
    assert all(of[keys[x]] == number for number, part in enumerate(tests) for x in part)


def test_folds_without_keys_are_those_of_equal_size():
    sizes = [(len(train), len(test)) for train, test in Dataset.range(11).k_folds(3, seed=4)]
    assert sizes == [(7, 4), (7, 4), (8, 3)]
    held = [x for _, test in Dataset.range(11).k_folds(3, seed=4) for x in lists(test)]
    assert sorted(held) == [*range(11)]


def test_divisions_that_would_leak_are_refused():
    shuffled = Dataset.range(9).shuffle(seed=1)
    for wrong in (
        shuffled,
        Dataset.range(9).repeat(2),
        Dataset.zip(shuffled, Dataset.range(9)),
        Dataset.range(9).shuffle(reshuffle_each_iteration=False),
        Dataset.range(9).sample(np.ones(9), seed=1),
    ):
        with pytest.raises(ValueError, match=r"call split\(\) first"):
            wrong.split(0.5, 1)
        if not (wrong.definition.transforms and "repeat" in str(wrong)):
            with pytest.raises(ValueError, match=r"call sample\(\) first"):
                wrong.sample(np.ones(9))
    a, b = Dataset.range(9).shuffle(seed=1, reshuffle_each_iteration=False).split(0.5, 1)
    assert sorted(lists(a) + lists(b)) == [*range(9)]
    for fractions in (0, 1.5, [0.5, 0.4], [], [1.2, -0.2]):
        with pytest.raises(ValueError, match="fractions"):
            Dataset.range(9).split(fractions, 1)
    with pytest.raises(ValueError, match=r"split\(by=...\): elements have no 'z'"):
        len(Dataset.from_arrays({"x": range(4)}).split(0.5, 1, by="z")[0])
    with pytest.raises(TypeError, match="a value for each"):
        Dataset.range(4).split(0.5, 1, by=1.5)


def test_samples_have_their_weights():
    weights = np.array([0, 1, 3, 0, 6.0])
    drawn = Dataset.range(5).sample(weights, seed=1, num_samples=10_000)
    epochs = [lists(drawn) for _ in range(2)]
    assert epochs[0] != epochs[1]
    for each in epochs:
        counts = collections.Counter(each)
        assert {*counts} == {1, 2, 4}
        assert all(abs(counts[x] / 1000 - weights[x]) < 0.15 for x in counts)
    assert epochs == [lists(Dataset.range(5).sample(weights, True, 1, 10_000).repeat(2))[:10_000], epochs[1]]
    rows = Dataset.from_arrays({"x": np.arange(5), "w": weights})
    for given_weights in ("w", lambda row: row["w"]):
        found = rows.sample(given_weights, seed=1, num_samples=10_000).map(lambda row: row["x"])
        assert lists(found) == epochs[0]


def test_classes_are_drawn_equally_often():
    label = np.array(["a"] * 90 + ["b"] * 9 + ["c"])
    rows = Dataset.from_arrays({"label": label, "x": np.arange(100)})
    for by in ("label", label, lambda row: row["label"]):
        drawn = collections.Counter(str(row["label"]) for row in rows.sample(by=by, seed=1, num_samples=3000))
        assert sorted(drawn) == ["a", "b", "c"]
        assert all(abs(count - 1000) < 100 for count in drawn.values())
    for wrong in ({}, {"weights": label, "by": label}):
        with pytest.raises(TypeError, match="either weights"):
            rows.sample(**wrong)


@MANY
@given(st.lists(st.integers(0, 5), max_size=30), st.sets(st.integers(0, 5)), st.integers(1, 4))
def test_a_filter_by_a_column_is_that_of_a_list(values, wanted, size):
    rows = Dataset.from_arrays({"key": np.array(values, int), "x": np.arange(len(values))})
    expected = [x for x, key in enumerate(values) if key in wanted]
    for by in ("key", np.array(values, int), lambda row: row["key"]):
        found = rows.filter(lambda key: int(key) in wanted, by=by).map(lambda row: row["x"])
        assert len(found) == len(expected)
        assert [x for batch in found.batch(size) for x in batch.tolist()] == expected
        assert sorted(int(x) for x in found.shuffle(seed=1)) == expected


def test_a_filter_by_a_column_needs_numbers_of_rows_and_one_order():
    rows = Dataset.range(9)
    assert lists(rows.map(lambda x: (x, [x, -x])).filter(lambda pair: pair[1] < -6, by=1)) == [
        (7, [7, -7]),
        (8, [8, -8]),
    ]
    for wrong, match in (
        (lambda: rows.shuffle(seed=1).filter(bool, by=0), "call filter"),
        (lambda: rows.batch(2).filter(bool, by=0), "single rows"),
        (lambda: len(rows.repeat().filter(bool, by=lambda x: x)), "ends"),
        (lambda: Dataset.from_iterable(range(3)).filter(bool, by=0), "in order"),
        (lambda: rows.filter("x", by=0), "needs a function"),
    ):
        with pytest.raises((TypeError, ValueError), match=match):
            wrong()


def test_what_is_chosen_of_files_is_kept():
    """Whether a dataset ends is asked before its files are opened."""
    rows = Dataset(Files([5, 3])).concatenate(Dataset.range(4))
    part = rows.split(0.5, seed=1)[0]
    assert lists(rows.select([11, -1, 5]).cache()) == [3, 3, 5]
    assert lists(part.cache()) == lists(part)
    assert lists(rows.filter(lambda x: x > 2, by=lambda x: x).cache()) == [3, 4, 5, 6, 7, 3]
    assert sorted(lists(rows.sample(np.ones(12), False, seed=1).cache())) == sorted(lists(rows))


def test_windows_of_no_rows_have_a_structure():
    none = Dataset.range(3).repeat(0).window(2).map(lambda x: x.sum())
    assert lists(none.concatenate(Dataset.range(2))) == [0, 1]


def test_samples_without_replacement_have_each_element_once():
    weights = np.array([1, 0, 1, 1000.0])
    drawn = Dataset.range(4).sample(weights, replacement=False, seed=1)
    epochs = [lists(drawn) for _ in range(30)]
    assert all(sorted(each) == [0, 2, 3] for each in epochs)
    assert sum(each[0] == 3 for each in epochs) > 27
    assert len({*map(tuple, epochs)}) > 1
    assert len(Dataset.range(4).sample(weights, False, 1, num_samples=2)) == 2
    with pytest.raises(ValueError, match="cannot draw 4 of 3"):
        len(Dataset.range(4).sample(weights, False, 1, num_samples=4))
    for wrong in ([1, 2], [1, -1, 1, 1], [0, 0, 0, 0], [1, 1, 1, np.nan]):
        with pytest.raises(ValueError, match="weight"):
            len(Dataset.range(4).sample(wrong, seed=1))


def windows_of(rows, size, shift, stride, drop):
    made = [rows[first:][: (size - 1) * stride + 1 : stride] for first in range(0, len(rows), shift)]
    return [each for each in made if len(each) == size or not drop]


@MANY
@given(
    lengths=LENGTHS,
    size=st.integers(1, 5),
    shift=st.integers(1, 7),
    stride=st.integers(1, 3),
    drop=st.booleans(),
    across=st.booleans(),
    replicas=st.integers(1, 3),
)
def test_windows(lengths, size, shift, stride, drop, across, replicas):
    ends = np.cumsum([0, *lengths])
    runs = [[*range(ends[-1])]] if across else [[*range(a, b)] for a, b in itertools.pairwise(ends)]
    expected = [each for run in runs for each in windows_of(run, size, shift, stride, drop)]
    dataset = Dataset(Files(lengths)).map(lambda x: x).window(size, shift, stride, drop, across)
    assert lists(dataset) == expected
    assert len(dataset) == len(expected)
    if across:
        stream = Dataset.from_iterable(range(ends[-1])).window(size, shift, stride, drop)
        assert lists(stream) == expected
    if drop and expected:
        assert dataset.element_spec.shape == (size,)
        shuffled = Dataset(Files(lengths)).window(size, shift, stride, drop, across).shuffle(seed=1).batch(3)
        found = divided(shuffled, "AUTO", replicas)
        assert sorted(w for each in found for batch in batches(each, 0) for w in batch) == sorted(expected)
    elif len({*map(len, expected)}) > 1:
        with pytest.raises(ValueError, match=r"drop_remainder=True"):
            next(iter(Dataset(Files(lengths)).window(size, shift, stride, drop, across).batch(2)))
        padded = lists(dataset.padded_batch(2, padding_values=-1))
        assert [[x for x in row if x >= 0] for batch in padded for row in batch] == expected


def test_windows_of_structures_shuffles_and_epochs():
    rows = Dataset.from_arrays({"t": np.arange(12), "x": np.arange(24.0).reshape(12, 2)}).shuffle(seed=2)
    windows = rows.window(3, 2, drop_remainder=True).batch(4)
    for epoch in range(2):
        (a, b) = [*windows][:2]
        order = lists(Dataset.range(12).shuffle(seed=2).repeat(2))[12 * epoch :][:12]
        assert np.concatenate([a["t"], b["t"]]).tolist() == windows_of(order, 3, 2, 1, True)
        assert (a["x"][..., 0] == 2 * a["t"]).all()
        assert a["x"].shape == (4, 3, 2)
    assert Dataset.range(3).repeat().window(2, drop_remainder=True)[4].tolist() == [2, 0]
    with pytest.raises(ValueError, match="across_files"):
        len(Dataset.range(9).window(2, across_files=False))
    with pytest.raises(ValueError, match="single rows"):
        Dataset.range(9).batch(2).window(2)


@pytest.mark.parametrize("policy", ["AUTO", "DATA", "FILE"])
@MANY
@given(lengths=LENGTHS, replicas=st.integers(1, 3), seed=st.integers(0, 9))
def test_parts_of_files_keep_their_files(policy, lengths, replicas, seed):
    lengths = [each + 1 for each in lengths]
    replicas = min(replicas, len(lengths))
    ends = np.cumsum([0, *lengths])
    for part in Dataset(Files(lengths)).split(0.5, seed):
        expected = lists(part)
        found = divided(part.shuffle(seed=seed).batch(3 * replicas), policy, replicas)
        assert sorted(flat(joined([batches(each, 0) for each in found]))) == expected
        if policy == "FILE":
            of = [{int(np.searchsorted(ends, x, "right")) for x in flat(batches(each, 0))} for each in found]
            assert sum(map(len, of)) == len(set().union(*of))
        elif policy == "AUTO":
            assert not found[0].why


def test_choices_that_mix_files_are_refused_by_file():
    dataset = Dataset(Files([3, 4])).shuffle(seed=1).select([3, 1]).batch(2)
    with pytest.raises(ValueError, match="FILE keeps files apart"):
        divided(dataset, "FILE", 2)
    with pytest.raises(ValueError, match="across_files"):
        divided(Dataset(Files([3, 4])).window(2, drop_remainder=True).batch(2), "FILE", 2)
    found = divided(Dataset(Files([3, 5])).window(2, drop_remainder=True, across_files=False).batch(2), "FILE", 2)
    assert [flat(batches(each, 0)) for each in found] == [[[0, 1]], [[3, 4], [5, 6]]]


def test_a_shuffle_of_windows_of_files_reads_each_row_once(tmp_path):
    for name, rows in ("a", 50), ("b", 41):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["x"] = np.arange(rows) + 100 * (name == "b")
    windows = Dataset.from_hdf5(tmp_path / "*.h5", "x").window(5, 3, drop_remainder=True, across_files=False)
    expected = windows_of([*range(50)], 5, 3, 1, True) + windows_of([*range(100, 141)], 5, 3, 1, True)
    assert lists(windows) == expected
    assert sorted(w for batch in lists(windows.shuffle(seed=1).batch(4)) for w in batch) == expected
    train, test = Dataset.from_hdf5(tmp_path / "*.h5", {"x": "x"}).split([0.6, 0.4], 1, by=lambda row: row["x"] // 10)
    tens = [{row["x"] // 10 for row in part.shuffle(seed=2)} for part in (train, test)]
    assert [len(tens[0] & tens[1]), len(tens[0] | tens[1])] == [0, 10]


def test_keys_of_files_read_one_column(tmp_path):
    for number in range(3):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["key"] = np.arange(20) // 4 + number
            file.create_dataset("x", data=np.arange(20.0) + 100 * number, chunks=(5,), fletcher32=True)
    files = str(tmp_path / "*.h5")
    shapes = {"dict": ({"a": "x", "k": "key"}, "k"), "tuple": (("x", "key"), 1), "last": (("x", "key"), -1)}
    found = {}
    for kind, (names, by) in shapes.items():
        parts = Dataset.from_hdf5(files, names).split([0.5, 0.5], seed=3, by=by)
        found[kind] = [sorted(float(nest.flatten(row)[0][0]) for row in part) for part in parts]
    assert found["dict"] == found["tuple"] == found["last"]
    whole = Dataset.from_hdf5(files, ("x", "key"))
    of = {float(x): int(key) for x, key in whole}
    assert not {of[x] for x in found["dict"][0]} & {of[x] for x in found["dict"][1]}
    with open(tmp_path / "0.h5", "r+b") as raw:  # a damaged chunk of "x" does not matter for the keys
        raw.seek(h5py.File(tmp_path / "0.h5")["x"].id.get_chunk_info(0).byte_offset)
        raw.write(b"spoilt")
    assert len(Dataset.from_hdf5(files, ("x", "key")).split([0.5, 0.5], seed=3, by=1)[0]) == len(found["dict"][0])


def test_keys_of_lines(tmp_path):
    pytest.importorskip("pyarrow.csv")
    (tmp_path / "a.csv").write_text("x,key\n" + "".join(f"{k},g{k % 5}\n" for k in range(40)))
    rows = Dataset.from_csv(tmp_path / "a.csv", dtypes={"key": str, "x": int})
    train, test = rows.split([0.6, 0.4], seed=1, by="key")
    assert not {row["key"] for row in train} & {row["key"] for row in test}
    assert sorted(int(row["x"]) for part in (train, test) for row in part) == [*range(40)]
