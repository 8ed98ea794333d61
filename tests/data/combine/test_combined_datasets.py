"""Tests of datasets that are made of others: values as tf.data gives them, in any order, in every epoch."""

import itertools

import h5py
import numpy as np
import pytest

from mpistrat import nest
from mpistrat.data import ArraySpec, Dataset, DatasetMismatchError, IterableDataset
from mpistrat.data.distribute.dataset import DistributedDataset
from tests.selection import core


def lists(dataset):
    return [nest.map_structure(lambda x: np.asarray(x).tolist(), each) for each in dataset]


def rows(n, of=lambda x: x):
    return Dataset.range(n).map(of)


def some(n):
    """A dataset of unknown length."""
    return Dataset.from_iterable(range(n))


@pytest.mark.parametrize("first", [Dataset.range(3), some(3)], ids=str)
def test_zip(first):
    zipped = Dataset.zip((first, {"a": Dataset.range(1, 9), "b": rows(5, lambda x: x * 10)}))
    assert lists(zipped) == [(k, {"a": k + 1, "b": 10 * k}) for k in range(3)]
    assert lists(Dataset.zip(first, Dataset.range(9)).batch(2)) == [([0, 1], [0, 1]), ([2], [2])]
    assert lists(Dataset.zip(first)) == [0, 1, 2]


def test_zip_keeps_the_rows_of_shuffles_together():
    same = [Dataset.range(50).shuffle(seed=1) for _ in range(2)]
    zipped = Dataset.zip(*same, Dataset.range(50))
    epochs = [lists(zipped) for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert all(a == b for a, b, _ in epochs[0] + epochs[1])
    assert epochs == [[(a, a, k) for k, a in enumerate(lists(same[0]))] for _ in range(2)]
    shuffled = lists(zipped.shuffle(seed=2))
    assert sorted(k for _, _, k in shuffled) == list(range(50))


def test_zips_of_other_forms():
    batched = Dataset.zip(Dataset.range(5).batch(2), Dataset.range(9).batch(2))
    assert lists(batched) == [([0, 1], [0, 1]), ([2, 3], [2, 3]), ([4], [4])]
    endless = Dataset.zip(Dataset.range(2).repeat(), Dataset.range(3).repeat())
    assert (endless.cardinality(), lists(endless.take(4))) == (-1, [(0, 0), (1, 1), (0, 2), (1, 0)])
    assert len(Dataset.zip(Dataset.range(2).repeat(), Dataset.range(3))) == 3
    for wrong in ([Dataset.range(2)], (), 5, (Dataset.range(2), np.arange(2))):
        with pytest.raises(TypeError):
            Dataset.zip(wrong)
    with pytest.raises(ValueError, match="single rows"):
        Dataset.zip(Dataset.range(5).batch(2), Dataset.range(5).batch(3))


@pytest.mark.parametrize("second", [Dataset.range(5, 7), some(2).map(lambda x: x + 5)], ids=str)
def test_concatenate(second):
    both = Dataset.range(3).concatenate(second)
    assert lists(both) == [0, 1, 2, 5, 6]
    assert lists(both.concatenate(Dataset.range(1)).batch(4)) == [[0, 1, 2, 5], [6, 0]]
    assert lists(Dataset.range(0).concatenate(second)) == [5, 6]


def test_concatenations_in_any_order():
    parts = [Dataset.range(20), rows(15, lambda x: x + 100), Dataset.range(200, 225).shuffle(seed=1)]
    whole = parts[0].concatenate(parts[1]).concatenate(parts[2])
    assert len(whole) == 60
    expected = [*range(20), *range(100, 115), *range(200, 225)]
    for shuffled in (whole.shuffle(seed=3), whole.shuffle(seed=3, mode="exact")):
        assert sorted(lists(shuffled)) == expected
    assert lists(whole.skip(18).take(3)) == [18, 19, 100]
    endless = Dataset.range(2).concatenate(Dataset.range(3).repeat())
    assert (endless.cardinality(), lists(endless.take(6))) == (-1, [0, 1, 0, 1, 2, 0])
    nested = Dataset.zip(whole, whole).concatenate(Dataset.zip(parts[0], parts[0]))
    (batch,) = lists(nested.batch(80))
    assert batch[0] == batch[1]
    assert sorted(batch[0][:60]) == expected
    assert batch[0][60:] == [*range(20)]


def test_concatenated_datasets_must_be_alike():
    for other in (Dataset.from_arrays([1.0]), Dataset.range(2).map(lambda x: (x, x)), Dataset.range(2).enumerate()):
        with pytest.raises(DatasetMismatchError, match="dataset 1"):
            lists(Dataset.range(3).concatenate(other))
    wider = Dataset.from_arrays([[1, 2]]).concatenate(Dataset.from_arrays([[1, 2, 3]]))
    assert wider.element_spec == ArraySpec((None,), "i8")
    assert lists(wider.padded_batch(2)) == [[[1, 2, 0], [1, 2, 3]]]


def test_enumerate():
    assert lists(Dataset.range(5, 8).enumerate(2).batch(2)) == [([2, 3], [5, 6]), ([4], [7])]
    assert lists(some(3).enumerate()) == [(0, 0), (1, 1), (2, 2)]
    assert Dataset.range(3).enumerate().element_spec == (ArraySpec((), "i8"),) * 2
    shuffled = lists(Dataset.range(9).shuffle(seed=1).enumerate())
    assert [k for k, _ in shuffled] == list(range(9)) != [x for _, x in shuffled]
    with pytest.raises(ValueError, match="single rows"):
        Dataset.range(3).batch(2).enumerate()


def test_filter():
    kept = Dataset.range(9).shuffle(seed=1).filter(lambda x: x > 2)
    assert isinstance(kept, IterableDataset)
    order = lists(Dataset.range(9).shuffle(seed=1))
    assert [x for batch in lists(kept.batch(4)) for x in batch] == lists(kept) == [x for x in order if x > 2]
    assert lists(Dataset.zip(Dataset.range(3), some(3)).filter(lambda a, b: a == b and a > 0)) == [(1, 1), (2, 2)]
    for wrong in (lambda x: x, lambda x: None, lambda x: np.array([True])):
        with pytest.raises(ValueError, match="True or False"):
            lists(Dataset.range(3).filter(wrong))
    with pytest.raises(ValueError, match="single rows"):
        Dataset.range(3).batch(2).filter(bool)


@pytest.mark.parametrize("make", [lambda n: Dataset.range(n), some], ids=["known", "unknown"])
def test_cache_makes_each_row_once(make):
    calls = []

    def fn(x):
        calls.append(int(x))
        return x * 2

    cached = make(6).map(fn).cache()
    assert [lists(cached.batch(4)) for _ in range(2)] == [[[0, 2, 4, 6], [8, 10]]] * 2
    assert lists(cached) == [0, 2, 4, 6, 8, 10]
    assert calls == list(range(6))


def test_a_cache_freezes_the_order_before_it():
    before, after = Dataset.range(30).shuffle(seed=1).cache(), Dataset.range(30).cache().shuffle(seed=1)
    assert lists(before) == lists(before)
    assert lists(after) != lists(after)
    (batch,) = before.batch(30)
    batch[:] = 0  # a batch is the program's
    assert sorted(lists(before)) == list(range(30))


def test_caches_of_other_forms():
    batches = Dataset.range(1, 6).batch(2).cache().map(lambda x: x)
    assert [lists(batches) for _ in range(2)] == [[[1, 2], [3, 4], [5]]] * 2
    ragged = rows(5, lambda x: np.full(x, x)).cache()
    for _ in range(2):
        assert lists(ragged.padded_batch(3)) == [[[0, 0], [1, 0], [2, 2]], [[3, 3, 3, 0], [4, 4, 4, 4]]]
    for refused in (
        lambda: Dataset.range(3).cache("s3://bucket/name"),
        lambda: Dataset.range(9).batch(3).shuffle(seed=1).cache(),
        lambda: lists(Dataset.range(3).repeat().cache().take(2)),
    ):
        with pytest.raises((ValueError, TypeError)):
            refused()


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("make", [lambda n: Dataset.range(n), some], ids=["known", "unknown"])
def test_mixtures_keep_the_order_of_each_dataset(make, stop):
    mixed = Dataset.sample_from_datasets(
        [make(40), make(30).map(lambda x: x + 100), make(9).map(lambda x: x + 200)], [2, 1, 0], 5, stop
    )
    found = lists(mixed)
    assert found == lists(mixed)  # the draws are those of every epoch
    first, second = [x for x in found if x < 100], [x - 100 for x in found if x >= 100]
    assert (first, second) == ([*range(len(first))], [*range(len(second))])
    assert (len(first), len(second)) == (40, 30) if not stop else len(first) == 40 or len(second) == 30
    if make(1).cardinality() == 1:
        assert len(mixed) == len(found)
        assert sorted(lists(mixed.shuffle(seed=1))) == sorted(found)


def test_weights_of_mixtures():
    endless = [rows(2, lambda x, n=n: x * 0 + n).repeat() for n in range(3)]
    mixed = Dataset.sample_from_datasets(endless, [1, 2, 7], seed=1)
    assert mixed.cardinality() == -1
    (batch,) = mixed.batch(6000).take(1)
    assert np.bincount(batch) / 6000 == pytest.approx([0.1, 0.2, 0.7], abs=0.03)
    far = lists(mixed.skip(5000).take(100))
    assert far == batch[5000:5100].tolist()
    for weights in ([1], [0, 0, 0], [1, -1, 1], [1, float("nan"), 1]):
        with pytest.raises(ValueError, match="weight"):
            Dataset.sample_from_datasets(endless, weights)
    with pytest.raises(ValueError, match="at least one"):
        Dataset.sample_from_datasets([])


def test_combinations_of_hdf5_files(tmp_path):
    for name, start, n in ("a", 0, 30), ("b", 1000, 17):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["x"] = np.repeat(np.arange(start, start + n)[:, None], 3, 1)
    a, b = (Dataset.from_hdf5(tmp_path / f"{name}.h5", "x") for name in "ab")
    both = a.concatenate(b)
    assert sorted(row[0] for row in lists(both.shuffle(seed=1))) == [*range(30), *range(1000, 1017)]
    pairs = Dataset.zip({"a": a.shuffle(seed=2), "b": b.map(lambda x: x[0])}).cache().shuffle(seed=4).batch(5)
    rows_of_epochs = [[x for batch in lists(pairs) for x in batch["b"]] for _ in range(2)]
    assert sorted(rows_of_epochs[0]) == sorted(rows_of_epochs[1]) == [*range(1000, 1017)]
    assert rows_of_epochs[0] != rows_of_epochs[1]


def kinds():
    """All combinations, of shuffles without a seed, each with what its rows are."""
    a = Dataset.range(40).shuffle()
    b = Dataset.range(100, 123).shuffle().map(lambda x: x + 1)
    return {
        "zip": Dataset.zip(a, b).map(lambda x, y: 1000 * x + y),
        "concatenate": a.concatenate(b),
        "sample": Dataset.sample_from_datasets([a, b], [1, 2]),
        "enumerate": a.enumerate().map(lambda k, x: 1000 * k + x),
        "cache": a.cache().shuffle(),
        "filter": a.filter(lambda x: x % 3 > 0),
        "nested": Dataset.zip(a.concatenate(b).shuffle(), Dataset.sample_from_datasets([b, a])).map(
            lambda x, y: 1000 * x + y
        ),
    }


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("steps", core([0, 3, 4], 3))
def test_states_continue_exactly(replicas, kind, steps):
    def first(peer):
        distributed = DistributedDataset(kinds()[kind].batch(7), peer)
        for _ in range(2):
            iterator = iter(distributed)
            begun = [*itertools.islice(iterator, steps)]
        state = iterator.state()
        return (state, [x.tolist() for x in begun], [x.tolist() for x in iterator], [x.tolist() for x in distributed])

    def again(peer):
        distributed = DistributedDataset(kinds()[kind].batch(5), peer)
        distributed.restore(state)
        return [x.tolist() for x in distributed], [x.tolist() for x in distributed]

    told = replicas(2, first)
    state = told[0][0]
    assert len({len(each[2]) for each in told}) == 1  # even steps
    restored = replicas(3, again)
    for epoch, whole in ((0, 2), (1, 3)):
        mine = [x for step in zip(*(each[epoch] for each in restored), strict=True) for part in step for x in part]
        want = [x for step in zip(*(each[whole] for each in told), strict=True) for part in step for x in part]
        assert mine == want


def test_states_of_other_combinations_are_refused(replicas):
    def replica(peer):
        one = DistributedDataset(Dataset.zip(Dataset.range(9), Dataset.range(9)).batch(2), peer)
        other = DistributedDataset(Dataset.zip(Dataset.range(9), Dataset.range(8)).batch(2), peer)
        mixed = [
            DistributedDataset(Dataset.sample_from_datasets([Dataset.range(9)] * 2, weights, seed=1).batch(2), peer)
            for weights in ([1, 2], [2, 1])
        ]
        for a, b in ((one, other), mixed):
            with pytest.raises(ValueError, match="cannot be restored"):
                b.restore(a.state())

    replicas(1, replica)


def test_replicas_must_combine_the_same(replicas):
    def replica(peer):
        dataset = Dataset.zip(Dataset.range(9), Dataset.range(9).take(5 + peer.rank)).batch(2)
        with pytest.raises(ValueError, match="rank 1"):
            DistributedDataset(dataset, peer)

    replicas(2, replica)
