"""Tests of padded batches: as tf.data pads, and on several replicas."""

import numpy as np
import pytest

from mpistrat import nest
from mpistrat.data import ArraySpec, Dataset
from mpistrat.data.distribute.dataset import DistributedDataset

RAGGED = Dataset.range(1, 5).map(lambda x: np.full(x, x))
STREAM = Dataset.from_iterable(range(1, 5)).map(lambda x: np.full(x, x))


def lists(dataset):
    return [nest.map_structure(lambda x: np.asarray(x).tolist(), each) for each in dataset]


@pytest.mark.parametrize("rows", [RAGGED, STREAM], ids=["known", "unknown"])
def test_rows_are_padded_to_the_longest(rows):
    assert lists(rows.padded_batch(2)) == [[[1, 0], [2, 2]], [[3, 3, 3, 0], [4, 4, 4, 4]]]
    fixed = rows.padded_batch(3, padded_shapes=[5], padding_values=-1)
    assert lists(fixed) == [[[1, -1, -1, -1, -1], [2, 2, -1, -1, -1], [3, 3, 3, -1, -1]], [[4, 4, 4, 4, -1]]]
    assert fixed.element_spec == ArraySpec((None, 5), "i8")
    dropped = rows.padded_batch(3, padded_shapes=(-1,), drop_remainder=True)
    assert lists(dropped) == [[[1, 0, 0], [2, 2, 0], [3, 3, 3]]]
    assert rows.padded_batch(2).element_spec == ArraySpec((None, None), "i8")


def test_structures_are_padded():
    pairs = Dataset.range(1, 4).map(lambda x: (np.full((x, 2), x / 2), x))
    want = [([[[0.5, 0.5], [9, 9]], [[1, 1], [1, 1]]], [1, 2]), ([[[1.5, 1.5]] * 3], [3])]
    assert lists(pairs.padded_batch(2, ([None, None], []), (9.0, None))) == want
    assert lists(pairs.padded_batch(2, padding_values=9)) == want
    named = Dataset.range(1, 3).map(lambda x: {"b": np.full(x, "a"), "a": x})
    assert lists(named.padded_batch(2, {"b": [3], "a": []})) == [{"a": [1, 2], "b": [["a", "", ""], ["a", "a", ""]]}]


def test_padding_that_does_not_fit():
    for options, kind, match in (
        ({"padded_shapes": [3]}, ValueError, "allows 3"),
        ({"padded_shapes": [3, 2]}, ValueError, "dimensions"),
        ({"padding_values": 1.5}, TypeError, "padding value"),
    ):
        with pytest.raises(kind, match=match):
            lists(RAGGED.padded_batch(4, **options))
    pairs = Dataset.range(1, 3).map(lambda x: (x, x))
    for shapes in ([None], ([], [], []), {"a": [], "b": []}):
        with pytest.raises(ValueError, match="structure of an element"):
            lists(pairs.padded_batch(2, shapes))
    with pytest.raises(ValueError, match="already in batches"):
        RAGGED.padded_batch(2).padded_batch(2)


@pytest.mark.parametrize("rows", [RAGGED, STREAM], ids=["known", "unknown"])
def test_each_replica_pads_its_piece(replicas, rows):
    def replica(peer):
        return lists(DistributedDataset(rows.padded_batch(3), peer))

    assert replicas(2, replica) == [[[[1, 0], [2, 2]], [[4, 4, 4, 4]]], [[[3, 3, 3]], []]]


def test_states_of_padded_batches(replicas):
    def first(peer):
        iterator = iter(DistributedDataset(RAGGED.shuffle(seed=1).padded_batch(2), peer))
        begun = next(iterator).tolist()
        return begun, iterator.state(), lists(iterator)

    def again(peer):
        distributed = DistributedDataset(RAGGED.shuffle(seed=1).padded_batch(2), peer)
        distributed.restore(state)
        return lists(distributed)

    ((_, state, rest),) = replicas(1, first)
    assert replicas(1, again) == [rest]


def test_padding_values_of_any_dtype():
    for dtype, value, expected in (
        ("u1", 255, [[1, 255], [2, 2]]),
        ("i2", -1, [[1, -1], [2, 2]]),
        ("U1", "xyz", [["1", "xyz"], ["2", "2"]]),
    ):
        made = Dataset.range(1, 3).map(lambda n, dtype=dtype: np.full(n, str(n)).astype(dtype))
        (batch,) = made.padded_batch(2, padding_values=value)
        assert batch.tolist() == expected
    for dtype, value in (("u1", 256), ("u1", -1), ("i1", 300), ("i8", 0.5)):
        made = Dataset.range(1, 3).map(lambda n, dtype=dtype: np.full(n, n, dtype))
        with pytest.raises(TypeError, match="padding value"):
            list(made.padded_batch(2, padding_values=value))
