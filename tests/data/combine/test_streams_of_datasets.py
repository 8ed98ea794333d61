"""Tests of combinations whose length is unknown, and of combinations that several iterators share."""

import sys
import threading

import numpy as np
import pytest

from mpistrat.data import Dataset, DatasetMismatchError
from mpistrat.data.combine.mixed import Choices
from mpistrat.data.distribute.dataset import DistributedDataset


def lists(dataset):
    return [np.asarray(each).tolist() for each in dataset]


def shuffled(n):
    return Dataset.range(n).shuffle(seed=1).filter(lambda x: x % 3 > 0)


def test_a_cache_has_the_order_of_the_first_epoch():
    whole = shuffled(20).cache()
    expected = lists(whole)
    left = shuffled(20).cache()
    next(iter(left))  # the epoch ends here, and nothing is kept
    assert lists(left) == lists(left) == lists(whole) == expected


def test_a_restored_cache_has_the_order_of_the_saved_run(replicas):
    def make(peer):
        return DistributedDataset(Dataset.range(30).shuffle().filter(lambda x: x > 2).cache().batch(4), peer)

    def saved(peer):
        dataset = make(peer)
        first = [batch.tolist() for batch in dataset]
        return first, iter(dataset).state()

    def restored(peer):
        dataset = make(peer)
        for _ in dataset:  # keeps rows of another seed
            pass
        dataset.restore(state)
        return [batch.tolist() for batch in dataset]

    told = replicas(2, saved)
    state = told[0][1]
    assert replicas(2, restored) == [first for first, _ in told]


@pytest.mark.parametrize(
    "combine",
    [
        lambda d: d.filter(lambda x: x >= 0),
        lambda d: Dataset.zip(d, Dataset.range(9)).map(lambda x, y: x),
        lambda d: d.concatenate(Dataset.range(0)),
        lambda d: d.enumerate().map(lambda k, x: x).filter(lambda x: x >= 0),
        lambda d: Dataset.sample_from_datasets([d]),
        lambda d: d.cache(),
    ],
)
def test_iterators_that_yield_only_once(combine, replicas):
    dataset = combine(Dataset.from_iterable(iter(range(5))))
    assert dataset.element_spec.dtype == "i8"
    assert lists(dataset) == [0, 1, 2, 3, 4]

    def replica(peer):
        mine = DistributedDataset(combine(Dataset.from_iterable(iter(range(5)))).batch(2), peer)
        assert mine.element_spec.dtype == "i8"
        return lists(mine)

    assert replicas(2, replica) == [[[0], [2], [4]], [[1], [3], []]]


def test_functions_after_batch_are_not_cached():
    with pytest.raises(ValueError, match="map follows batch"):
        Dataset.range(4).batch(2).map(lambda x: x).cache()


def test_replicas_must_mix_the_same(replicas):
    def replica(peer):
        parts = [Dataset.range(9), Dataset.range(9).filter(lambda x: x > 1)]
        for other in ({"weights": [1, 1 + peer.rank]}, {"seed": peer.rank}, {"stop_on_empty_dataset": peer.rank > 0}):
            mixed = Dataset.sample_from_datasets(parts, **{"seed": 1, **other})
            with pytest.raises(ValueError, match="rank 1"):
                DistributedDataset(mixed.batch(2), peer)
        DistributedDataset(Dataset.sample_from_datasets(parts).batch(2), peer)  # a drawn seed is agreed

    replicas(2, replica)


def test_iterators_of_one_mixture_at_the_same_time():
    rows = np.arange(40_000)
    expected = Choices(1, [1, 2], [15_000, 25_000], False)(rows)
    shared = Choices(1, [1, 2], [15_000, 25_000], False)
    found = {}

    def read(thread):
        found[thread] = [np.concatenate(each) for each in zip(*map(shared, np.split(rows, 10)), strict=True)]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    for thread in range(4):
        np.testing.assert_array_equal(found[thread], expected)


def test_datasets_that_follow_each_other_must_be_alike():
    integers, floats = Dataset.from_iterable([1, 2]), Dataset.from_iterable([1.5])
    for wrong in (
        integers.concatenate(floats),
        integers.concatenate(Dataset.from_iterable([(1, 2)])),
        Dataset.sample_from_datasets([integers, floats], seed=1),
    ):
        with pytest.raises(DatasetMismatchError, match=r"dataset [01] has .* dataset [01] has"):
            list(wrong)
    ragged = Dataset.from_iterable([[1, 2]]).concatenate(Dataset.from_iterable([[1]]))
    assert lists(ragged.padded_batch(2)) == [[[1, 2], [1, 0]]]


@pytest.mark.parametrize("other", [np.zeros(2), np.float64(1)], ids=["shorter", "scalar"])
@pytest.mark.parametrize(("name", "arguments"), [("unbatch", ()), ("pack", (4,))])
def test_elements_that_are_taken_apart_need_one_length(name, arguments, other):
    dataset = getattr(Dataset.range(2).map(lambda _: (np.zeros(3), other)), name)(*arguments)
    with pytest.raises(ValueError, match=rf"{name}\(\) needs arrays of one length along axis 0, .*\(3,\)"):
        list(dataset)
