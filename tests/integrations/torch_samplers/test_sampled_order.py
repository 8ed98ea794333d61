"""Samplers against a list: the rows of an epoch in order, which is that of a `Dataset`, on any number of ranks."""

import json
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.data import Dataset

IterableDataset = pytest.importorskip("torch.utils.data", reason="torch is not installed").IterableDataset
from mpistrat.integrations.torch import BatchSampler, Sampler  # noqa: E402

SEED = 3


def oracle(n, epoch, shuffle=True, weights=None, count=None):
    """Return all rows of an epoch."""
    dataset = Dataset.range(n)
    if weights is not None:
        dataset = dataset.sample(weights, seed=SEED, num_samples=count)
    elif shuffle:
        dataset = dataset.shuffle(seed=SEED)
    iterator = iter(dataset)
    for _ in range(epoch):
        list(iterator)
        iterator = iter(dataset)
    return [int(row) for row in iterator]


def samplers(kind, n, ranks, *arguments, **options):
    return [kind(range(n), *arguments, num_replicas=ranks, rank=rank, seed=SEED, **options) for rank in range(ranks)]


def steps(each):
    """Return the rows of each step of all ranks, and the number of batches of each rank."""
    lists = [[*batches] for batches in each]
    most = max(map(len, lists))
    joined = [[row for rank in lists for row in (rank[k] if k < len(rank) else [])] for k in range(most)]
    return joined, [*map(len, lists)]


def flat(lists):
    return [row for each in lists for row in each]


lengths = st.integers(1, 200)
ranks = st.integers(1, 6)


@settings(max_examples=60)
@given(lengths, ranks, ranks, st.integers(1, 4), st.integers(0, 40), st.booleans(), st.integers(0, 2))
def test_a_resume_reads_the_rest(n, before, after, size, stop, shuffle, epoch):
    """Of the same epoch, each row once, and in the same steps if these have as many rows."""
    rows = oracle(n, epoch, shuffle)
    one = 60 if size == 4 else before * size
    other = 60 if size == 4 else after * size
    if n < max(before, after):
        return
    old = samplers(BatchSampler, n, before, shuffle=shuffle, global_batch_size=one)
    iterators = []
    for each in old:
        each.set_epoch(epoch)
        assert len(each) == len(old[0])
        iterators.append(iter(each))
    first, counts = steps(islice(each, stop) for each in iterators)
    assert len({*counts}) == 1
    states = [each.state_dict(counts[0]) for each in old]
    assert all(state == states[0] for state in states)
    state = json.loads(json.dumps(states[0]))
    assert (state["epoch"], state["position"]) == (epoch, len(flat(first)))
    new = samplers(BatchSampler, n, after, shuffle=shuffle, global_batch_size=other)
    if 0 < (n - state["position"]) < after:
        with pytest.raises(ValueError, match="cannot be divided by"):
            new[0].load_state_dict(state)
        return
    for each in new:
        each.load_state_dict(state)
        each.set_epoch(epoch)  # as a program does that has not got a state
    rest, counts = steps(new)
    assert len({*counts}) == 1
    assert flat(first) + flat(rest) == rows
    assert [*map(len, rest[:-2])] == [other] * len(rest[:-2])
    assert flat(steps(new)[0]) == oracle(n, epoch + 1, shuffle)


@given(lengths, ranks, st.integers(1, 9), st.sampled_from([None, True, False]), st.booleans())
def test_steps_are_pieces_of_the_order(n, count, size, pad, drop):
    """The last step has what the arguments say."""
    if (pad and drop) or (n < count and pad is None and not drop):
        return
    each = samplers(BatchSampler, n, count, size, pad=pad, drop_last=drop)
    assert [len(one) for one in each] == (found := steps(each))[1]
    rows, unit = oracle(n, 0), count * size
    full, rest = divmod(n, unit)
    expected = [rows[k * unit : (k + 1) * unit] for k in range(full)]
    last = rows[full * unit :]
    if pad:
        last += (rows * (unit // n + 1))[: -rest % count]
    if drop or not rest:
        last = []
    elif pad is None and expected and rest < max(unit / 2, count):
        last = expected.pop() + last
        half = len(last) - len(last) // 2
        if len(last) - half >= count:
            expected, last = [*expected, last[:half]], last[half:]
    assert found[0] == [*expected, *([last] if last else [])]
    assert max(found[1]) - min(found[1]) <= (pad is False)


@given(lengths, st.integers(1, 30))
def test_steps_do_not_depend_on_the_ranks(n, half):
    """If a rank has two rows or more of a step."""
    expected = steps(samplers(BatchSampler, n, 1, 2 * half))
    assert expected[1] == [-(-n // (2 * half))]
    for count in range(2, 1 + min(half, n, 7)):
        rows, counts = steps(samplers(BatchSampler, n, count, global_batch_size=2 * half))
        assert rows == expected[0]
        assert counts == expected[1] * count


@given(lengths, ranks, ranks, st.integers(0, 60), st.booleans())
def test_rows_one_by_one(n, before, after, stop, pad):
    """A rank has every R-th row, and the rest is divided by other ranks."""
    old = samplers(Sampler, n, before, pad=pad)
    rows = oracle(n, 0)
    lists = [[*islice(each, stop)] for each in old]
    padded = rows + (rows * before)[: -n % before if pad else 0]
    assert lists == [padded[rank::before][:stop] for rank in range(before)]
    state = old[0].state_dict(len(lists[0]))
    new = samplers(Sampler, n, after, pad=pad)
    for each in new:
        each.load_state_dict(state)
        each.set_epoch(0)
    lists = [[*each] for each in new]
    left = rows[before * stop :]
    left += (rows * after)[: -len(left) % after if pad else 0]
    assert lists == [left[rank::after] for rank in range(after)]


def test_draws_by_weight():
    weights = np.arange(10.0)
    for count in (None, 25):
        each = samplers(BatchSampler, 10, 3, 2, weights=weights, num_samples=count)
        for epoch in range(2):
            assert flat(steps(each)[0]) == oracle(10, epoch, weights=weights, count=count)
        with pytest.raises(ValueError, match=r"order is .*; give the shuffle, seed and weights of the saved run"):
            samplers(BatchSampler, 10, 3, 2)[0].load_state_dict(each[0].state_dict(0))


def test_epochs():
    """They follow each other; an iteration that was given up begins again; `set_epoch` goes anywhere."""
    (each,) = samplers(BatchSampler, 12, 1, 5)
    first = oracle(12, 0)
    next(iter(each))
    assert [flat(each), flat(each)] == [first, oracle(12, 1)]
    assert each.epoch == 2
    each.set_epoch(0)
    assert flat(each) == first
    iterator = iter(each)
    next(iterator)
    state = each.state_dict(1)
    each.load_state_dict(state)
    next(iter(each))  # a look at a batch changes nothing
    assert flat(each) == oracle(12, 1)[5:]
    assert flat(each) == oracle(12, 2)
    assert len(each) == 3


def test_an_epoch_at_its_end():
    (each,) = samplers(BatchSampler, 12, 1, 5)
    list(each)
    state = each.state_dict(3)
    assert (state["epoch"], state["position"]) == (0, 12)
    each.load_state_dict(state)
    assert flat(each) == oracle(12, 1)
    each.load_state_dict(state)
    each.set_epoch(0)
    assert [*each] == []
    assert flat(each) == oracle(12, 1)


def test_states_need_a_count():
    """Workers take batches ahead of the loop."""
    (each,) = samplers(BatchSampler, 12, 1, 5)
    start = each.state_dict()
    assert (start["epoch"], start["position"]) == (0, 0)
    iterator = iter(each)
    assert each.state_dict() == start
    next(iterator)
    with pytest.raises(ValueError, match=r"1 batches were taken .* or iterate over CountedLoader"):
        each.state_dict()
    with pytest.raises(ValueError, match="cannot have got 2 batches since the iteration began: 1 were taken"):
        each.state_dict(2)
    assert each.state_dict(0) == start
    each.set_epoch(0)  # Lightning begins before it sets the epoch
    assert each.state_dict(1)["position"] == 5
    each.set_epoch(1)
    assert each.state_dict()["epoch"] == 1


def test_states_that_do_not_fit():
    (each,) = samplers(BatchSampler, 12, 1, 5)
    state = each.state_dict()
    for given_state in (None, {}, {**state, "epoch": -1}, {**state, "position": 1.0}):
        with pytest.raises(TypeError, match="needs what state_dict"):
            each.load_state_dict(given_state)
    for changed, text in (
        ({"position": 13}, "its position is 13, of 12 rows"),
        ({"length": 11}, "its number of rows is 11, but here it is 12"),
        ({"order": "no"}, "its order is no"),
        ({"version": 2}, "its version is 2"),
    ):
        with pytest.raises(ValueError, match=text):
            each.load_state_dict({**state, **changed})
    with pytest.raises(ValueError, match="seed 4; give"):
        BatchSampler(range(12), 5, seed=4).load_state_dict(state)


class Stream(IterableDataset):
    def __len__(self):
        return 3

    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((Stream(), 2), {}, TypeError, "divide the rows of an IterableDataset in its own __iter__"),
        ((iter(()), 2), {}, TypeError, "needs a map-style dataset"),
        ((range(3),), {}, TypeError, "either batch_size"),
        ((range(3), 2), {"global_batch_size": 2}, TypeError, "either batch_size"),
        ((range(3), 0), {}, ValueError, "batch_size must be at least 1"),
        ((range(3),), {"global_batch_size": 1, "num_replicas": 2, "rank": 0}, ValueError, "must be at least 2"),
        ((range(3), 1, 2, 2), {}, ValueError, "rank must be below num_replicas, 2, got 2"),
        ((range(3), 1, 4, 0), {}, ValueError, "3 rows cannot be divided by 4 ranks .* pad=True to repeat 1"),
        ((range(3), 1), {"pad": True, "drop_last": True}, ValueError, "give one of them"),
        ((range(3), 1), {"num_samples": 2}, ValueError, "give weights, too"),
        ((range(3), 1), {"weights": [1, 2]}, ValueError, "a value for each of the 3 elements"),
        ((range(3), 1), {"seed": 0.5}, TypeError, "seed must be an integer"),
    ],
)
def test_wrong_arguments(arguments, options, error, text):
    with pytest.raises(error, match=text):
        BatchSampler(*arguments, **options)


def test_rows_that_ranks_cannot_share_are_refused():
    with pytest.raises(ValueError, match=r"10 rows cannot be divided by 4 ranks .* BatchSampler needs none of them"):
        Sampler(range(10), num_replicas=4, rank=0)


def test_many_rows_take_no_memory():
    each = BatchSampler(range(10**12), 3, num_replicas=2, rank=1)
    assert len({*flat(islice(each, 5000))}) == 15000
    state = each.state_dict(5000)
    each.load_state_dict({**state, "position": 10**12 - 7})
    assert [*map(len, each)] == [2, 1]
