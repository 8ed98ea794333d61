"""Pipelines, random ones too, compared with the same pipelines of tf.data, plain lists, and other numbers of ranks."""

import numpy as np
import pytest

from mpistrat import nest
from mpistrat.data import Dataset
from tests.data.random_pipelines import beside_others, on_ranks

pytestmark = pytest.mark.full


def as_lists(dataset):
    return [nest.map_structure(lambda x: np.asarray(x).tolist(), each) for each in dataset]


@pytest.fixture(scope="module")
def tf():
    return pytest.importorskip("tensorflow")


def test_random_pipelines_are_those_of_tf_data(tf):
    for seed in range(70):
        beside_others(seed, tf)


def test_random_pipelines_are_those_of_lists():
    for seed in range(1000, 1300):
        beside_others(seed)


def test_random_pipelines_are_the_same_on_any_ranks():
    assert sum(on_ranks(seed) for seed in range(200)) > 150


def test_structures_are_passed_as_in_tf_data(tf):
    ours = Dataset.from_arrays((np.arange(5), np.arange(5) * 10))
    theirs = tf.data.Dataset.from_tensor_slices((np.arange(5), np.arange(5) * 10))
    both = {
        "take_while": lambda d: d.take_while(lambda a, b: b < 30),
        "scan": lambda d: d.scan(np.int64(1), lambda s, row: (s + row[0], (s, row[1]))),
        "unbatch": lambda d: d.batch(2).map(lambda a, b: (b, a)).unbatch(),
    }
    for name, call in both.items():
        assert as_lists(call(ours)) == as_lists(call(theirs).as_numpy_iterator()), name
    total = ours.reduce(0, lambda s, row: s + int(row[0] + row[1]))
    assert total == int(theirs.reduce(np.int64(0), lambda s, row: s + row[0] + row[1]))
