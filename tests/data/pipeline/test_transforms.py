"""Tests of chains of transforms, compared with a serial program."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.data import Dataset
from mpistrat.data.rows.blocks import BlockOrder
from mpistrat.data.rows.permutation import permutation

fast = settings(derandomize=True, database=None, deadline=None, max_examples=150)
MANY = 40


def serial(ops, rows, iteration):
    """Return the elements of one iteration, made one after another as in tf.data."""
    if not ops:
        yield from range(rows)
        return
    *before, (name, *args) = ops
    if name == "repeat":
        (count,) = args
        turns = itertools.count() if count is None else range(count)
        first = iteration * (2**32 if count is None else count)
        for turn in turns:
            empty = True
            for element in serial(before, rows, first + turn):
                empty = False
                yield element
            if empty:
                return
        return
    elements = serial(before, rows, iteration)
    if name == "map":
        yield from (e * 3 + 1 if isinstance(e, int) else [x * 3 + 1 for x in e] for e in elements)
    elif name == "take":
        yield from itertools.islice(elements, args[0])
    elif name == "skip":
        yield from itertools.islice(elements, args[0], None)
    elif name == "shard":
        yield from itertools.islice(elements, args[1], None, args[0])
    elif name == "shuffle":
        seed, again, mode = args
        kept = list(elements)
        key = iteration if again else 0
        if mode == "exact":
            order = permutation(len(kept), seed, key)
        else:
            order = BlockOrder(len(kept), None)(np.arange(len(kept)), seed, key)
        yield from (kept[i] for i in order)
    elif name == "batch":
        size, drop = args
        while piece := list(itertools.islice(elements, size)):
            if len(piece) == size or not drop:
                yield piece


def build(ops, rows):
    dataset = Dataset.range(rows)
    for name, *args in ops:
        if name == "map":
            dataset = dataset.map(lambda x: x * 3 + 1)
        elif name == "shuffle":
            dataset = dataset.shuffle(seed=args[0], reshuffle_each_iteration=args[1], mode=args[2])
        else:
            dataset = getattr(dataset, name)(*args)
    return dataset


small = st.integers(0, 7)
step = st.one_of(
    st.just(("map",)),
    st.tuples(st.just("take"), st.integers(0, 12)),
    st.tuples(st.just("skip"), small),
    st.integers(1, 4).flatmap(lambda n: st.tuples(st.just("shard"), st.just(n), st.integers(0, n - 1))),
    st.tuples(st.just("shuffle"), st.integers(0, 3), st.booleans(), st.sampled_from(["block", "exact"])),
    st.tuples(st.just("repeat"), st.integers(0, 3)),
)
batch = st.tuples(st.just("batch"), st.integers(1, 5), st.booleans())


@st.composite
def chains(draw):
    before, after = draw(st.lists(step, max_size=4)), draw(st.lists(step, max_size=3))
    return [*before, *draw(st.lists(batch, max_size=1)), *after]


@fast
@given(chains(), st.integers(0, 11))
def test_chain_equals_serial_program(ops, rows):
    dataset = build(ops, rows)
    for epoch in range(3):
        assert [np.asarray(x).tolist() for x in dataset] == list(serial(ops, rows, epoch))
    assert len(dataset) == dataset.cardinality() == len(list(serial(ops, rows, 0)))


@pytest.mark.full
@fast
@given(chains(), chains(), st.integers(1, 9))
def test_endless_chain_equals_serial_program(before, after, rows):
    after = [op for op in after if op[0] != "shuffle" and not (op[0] == "batch" and "batch" in dict_of(before))]
    ops = [*before, ("repeat", None), *after]
    if not list(serial(before, rows, 0)):
        return
    dataset = build(ops, rows)
    found = [np.asarray(x).tolist() for x in itertools.islice(dataset, MANY)]
    assert found == list(itertools.islice(serial(ops, rows, 0), MANY))


def dict_of(ops):
    return {name for name, *_ in ops}


def test_endless_shuffle_permutes_windows():
    dataset = Dataset.range(6).repeat().shuffle(4, seed=1).take(12)
    found = [int(x) for x in dataset]
    stream = [0, 1, 2, 3, 4, 5] * 2
    for start in range(0, 12, 4):
        assert sorted(found[start : start + 4]) == sorted(stream[start : start + 4])
    assert found != stream


def test_endless_shuffle_needs_a_buffer():
    with pytest.raises(ValueError, match=r"before repeat\(\)"):
        list(Dataset.range(6).repeat().shuffle(seed=1).take(3))


def test_every_repetition_has_its_order_and_seeds_reproduce():
    def two():
        return [x.tolist() for x in Dataset.range(20).shuffle(seed=5).repeat(2).batch(20)]

    first, second = two()
    assert first != second
    assert sorted(first) == sorted(second) == list(range(20))
    assert two() == [first, second]
    by_epoch = Dataset.range(20).shuffle(seed=5).batch(20)
    assert [next(iter(by_epoch)).tolist() for _ in range(2)] == [first, second]


def test_unseeded_shuffles_differ_but_branches_of_one_agree():
    a, b = (Dataset.range(50).shuffle().batch(50) for _ in range(2))
    assert next(iter(a)).tolist() != next(iter(b)).tolist()
    shuffled = Dataset.range(50).shuffle()
    train, test = shuffled.skip(10), shuffled.take(10)
    for _ in range(2):
        assert sorted(int(x) for part in (train, test) for x in part) == list(range(50))


def test_debug_warns_of_batches_that_are_shuffled(monkeypatch, recwarn):
    monkeypatch.setenv("MPISTRAT_DEBUG", "1")
    Dataset.range(8).shuffle(seed=0).batch(2).map(abs)
    assert not recwarn.list
    Dataset.range(8).batch(2).shuffle(3)
    (warning,) = recwarn.list
    assert "moves whole batches, not rows: call it first" in str(warning.message)
    assert warning.filename == __file__
    monkeypatch.delenv("MPISTRAT_DEBUG")
    Dataset.range(8).batch(2).shuffle(3)
    assert len(recwarn.list) == 1


def test_order_without_reshuffling():
    dataset = Dataset.range(30).shuffle(seed=2, reshuffle_each_iteration=False).batch(30)
    assert next(iter(dataset)).tolist() == next(iter(dataset)).tolist()


def test_permutation_is_pinned():
    # A change here changes every seeded run of every user.
    assert permutation(8, 7, 0).tolist() == PINNED
    assert permutation(8, -7, 3).tolist() != permutation(8, 7, 3).tolist()


PINNED = [6, 1, 7, 5, 3, 0, 2, 4]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda d: d.batch(0), ValueError, "batch size must be at least 1, got 0"),
        (lambda d: d.batch(-3), ValueError, "got -3"),
        (lambda d: d.batch(2.0), TypeError, "must be an integer, not 2.0"),
        (lambda d: d.batch(True), TypeError, "must be an integer"),
        (lambda d: d.batch(2).batch(2), ValueError, "already in batches of 2"),
        (lambda d: d.repeat(-2), ValueError, "at least -1"),
        (lambda d: d.take("3"), TypeError, "must be an integer"),
        (lambda d: d.shard(2, 2), ValueError, "from 0 to num_shards - 1, got 2 of 2"),
        (lambda d: d.shard(0, 0), ValueError, "got 0 of 0"),
        (lambda d: d.shard(2, -1), ValueError, "got -1 of 2"),
        (lambda d: d.shuffle(0), ValueError, "buffer_size"),
        (lambda d: d.shuffle(seed="x"), TypeError, "seed"),
        (lambda d: d.map(3), TypeError, "needs a function"),
        (lambda d: d.with_options("x"), TypeError, "Options"),
        (lambda d: len(d.repeat()), TypeError, "endless"),
    ],
)
def test_wrong_arguments(call, error, text):
    with pytest.raises(error, match=text):
        call(Dataset.range(4))


def test_questions():
    dataset = Dataset.range(4)
    assert dataset.repeat().cardinality() == -1
    assert dataset.repeat(-1).cardinality() == -1
    assert dataset.take(-1).cardinality() == 4
    assert dataset.skip(-1).cardinality() == 0
    assert bool(dataset.take(0))
    assert repr(dataset.shuffle(seed=1).batch(2)) == "<Dataset: range(0, 4), shuffle(seed=1), batch(2)>"
    assert [int(x) for x in Dataset.range(9, 2, -3)] == [9, 6, 3]


def test_transforms_leave_their_input_alone():
    dataset = Dataset.range(4)
    dataset.batch(2).repeat()
    assert len(dataset) == 4
    assert dataset.batch_size is None
