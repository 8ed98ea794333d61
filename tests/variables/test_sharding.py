"""The rows of shards, against NumPy on the whole array."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.variables.partitioners import Sharding

SHARDINGS = st.builds(Sharding, st.integers(0, 30), st.integers(1, 12))
BOUND = st.none() | st.integers(-40, 40)
STEPS = st.none() | st.integers(-7, 7).filter(bool)
SLICES = st.builds(slice, BOUND, BOUND, STEPS)
# What may follow the first axis of an array with 3 columns.
OTHERS = st.sampled_from([(), (1,), (-1,), (slice(None, None, -1),), (..., 2), ([0, 2],), (None,)])


def whole_of(sharding):
    return np.arange(sharding.rows * 3.0).reshape(sharding.rows, 3)


def read(sharding, whole, key):
    """As a variable reads: the rows of each part, concatenated, and then the rest of the index."""
    selection = sharding.select(key)
    shards = sharding.cut(whole)
    return np.concatenate([shards[shard][rows] for shard, rows in selection.parts])[selection.rest]


@given(SHARDINGS)
def test_shards_are_even_and_in_order(sharding):
    whole = whole_of(sharding)
    shards = sharding.cut(whole)
    assert len(shards) == sharding.shards == max(1, min(sharding.shards, sharding.rows))
    assert tuple(map(len, shards)) == sharding.lengths
    assert sorted(sharding.lengths, reverse=True) == list(sharding.lengths)
    assert max(sharding.lengths) - min(sharding.lengths) <= 1
    assert np.array_equal(np.concatenate(shards), whole)
    assert all(shard.base is whole.base for shard in shards)
    assert sharding.shard_of(np.arange(sharding.rows)).tolist() == [
        shard for shard, length in enumerate(sharding.lengths) for _ in range(length)
    ]


@given(SHARDINGS, SLICES, OTHERS)
def test_slices(sharding, rows, others):
    whole = whole_of(sharding)
    for key in ((rows, *others), rows):
        assert np.array_equal(read(sharding, whole, key), whole[key])
    shards = sharding.cut(whole)
    taken = sum(len(shards[shard][part]) for shard, part in sharding.select(rows).parts)
    assert taken == len(whole[rows])  # and no row more


@given(SHARDINGS, st.integers(-40, 40), OTHERS)
def test_single_rows(sharding, row, others):
    whole = whole_of(sharding)
    for key in ((row, *others), row, np.int64(row)):
        if -sharding.rows <= row < sharding.rows:
            assert np.array_equal(read(sharding, whole, key), whole[key])
            assert len(sharding.select(key).parts) == 1
        else:
            with pytest.raises(IndexError, match=f"index {row} is out of range"):
                read(sharding, whole, key)


@given(SHARDINGS, st.data())
def test_other_indices(sharding, data):
    whole = whole_of(sharding)
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=sharding.rows, max_size=sharding.rows)), bool)
    for key in (mask, ..., (..., 1), None, (), (mask, 0), whole > 5, True):
        assert np.array_equal(read(sharding, whole, key), whole[key])


@given(SHARDINGS, st.data())
def test_rows_by_shard(sharding, data):
    """Rows are read into their places; repeated rows all count when they are added."""
    rows = st.integers(0, max(0, sharding.rows - 1))
    indices = np.array(data.draw(st.lists(rows, max_size=20 if sharding.rows else 0)), np.int64)
    whole = whole_of(sharding)
    result = np.full((len(indices), 3), -1.0)
    total = np.zeros_like(whole)
    shards, totals = sharding.cut(whole), sharding.cut(total)
    parts = sharding.by_shard(indices)
    for part in parts:
        result[part.positions] = shards[part.shard][part.rows]
        np.add.at(totals[part.shard], part.rows, part.positions[:, None] + 1.0)
    oracle = np.zeros_like(whole)
    np.add.at(oracle, indices, np.arange(len(indices))[:, None] + 1.0)
    assert np.array_equal(result, whole[indices])
    assert np.array_equal(total, oracle)
    assert [part.shard for part in parts] == sorted({*sharding.shard_of(indices).tolist()})
    assert all((np.diff(part.positions) > 0).all() for part in parts)  # the last of equal rows stays the last


def test_refusals():
    sharding = Sharding(5, 2)
    for indices in ([5], [-1], [0, 7]):
        with pytest.raises(ValueError, match="the array has 5 rows: indices from"):
            sharding.by_shard(np.array(indices))
    with pytest.raises(ValueError, match="step cannot be zero"):
        sharding.select(slice(0, 2, 0))
    for wrong in (np.zeros(4), np.zeros(())):
        with pytest.raises(ValueError, match="cannot be cut into shards of 5 rows"):
            sharding.cut(wrong)
