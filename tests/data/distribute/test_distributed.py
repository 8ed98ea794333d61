"""Tests of how replicas share a dataset, compared with the order of one process."""

import itertools
import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat import context
from mpistrat.data import (
    SHARD_HINT,
    ArraySpec,
    AutoShardPolicy,
    Dataset,
    DistributedDataset,
    DistributedDatasetsFromFunction,
    InputOptions,
    InputReplicationMode,
    Options,
)
from mpistrat.data.rows.contracts import Source
from mpistrat.data.rows.lanes import piece

fast = settings(derandomize=True, database=None, deadline=None, max_examples=60)


def with_policy(dataset, name):
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy[name]
    return dataset.with_options(options)


def flat(parts):
    return [row for part in parts for row in part]


def lists(distributed, epochs=1):
    return [[np.asarray(batch).tolist() for batch in distributed] for _ in range(epochs)]


@given(st.integers(0, 10_000), st.integers(1, 70))
@fast
def test_pieces_follow_each_other_and_differ_by_one(n, replicas):
    bounds = [piece(n, replicas, r) for r in range(replicas)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == n
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    sizes = [b - a for a, b in bounds]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@fast
@given(
    size=st.integers(1, 8),
    rows=st.integers(0, 45),
    batch=st.integers(1, 13),
    drop=st.booleans(),
    seed=st.none() | st.integers(0, 5),
    turns=st.integers(1, 2),
)
def test_every_row_once_in_the_same_number_of_steps(replicas, size, rows, batch, drop, seed, turns):
    def dataset():
        made = Dataset.range(rows)
        made = made if seed is None else made.shuffle(seed=seed)
        return made.repeat(turns).map(lambda x: x + 100).batch(batch, drop)

    def replica(peer):
        distributed = DistributedDataset(dataset(), peer)
        return distributed.cardinality, lists(distributed, epochs=2)

    results = replicas(size, replica)
    serial = dataset()
    expected = [[x.tolist() for x in serial] for _ in range(2)]
    steps = turns * rows // batch if drop else math.ceil(turns * rows / batch)
    for epoch in range(2):
        pieces = [epochs[epoch] for _, epochs in results]
        assert {length for length, _ in results} == {steps} == {len(mine) for mine in pieces}
        joined = [flat(mine[k] for mine in pieces) for k in range(steps)]
        assert joined == expected[epoch]
        if not drop:
            assert sorted(flat(joined)) == sorted([x + 100 for x in range(rows)] * turns)
        for k in range(steps):
            n = len(expected[epoch][k])
            assert [len(mine[k]) for mine in pieces] == [n // size + (r < n % size) for r in range(size)]


@pytest.mark.parametrize(
    ("rows", "batch", "size", "expected"),
    [
        (8, 4, 2, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        (7, 4, 2, [[[0, 1], [4, 5]], [[2, 3], [6]]]),
        (5, 4, 2, [[[0, 1], [4]], [[2, 3], []]]),
        (7, 7, 3, [[[0, 1, 2]], [[3, 4]], [[5, 6]]]),
        (3, 3, 2, [[[0, 1]], [[2]]]),
    ],
)
def test_known_cases(replicas, rows, batch, size, expected):
    dataset = Dataset.range(rows).batch(batch)
    assert replicas(size, lambda peer: lists(DistributedDataset(dataset, peer))[0]) == expected


def test_unseeded_shuffle_is_the_same_on_all_replicas_and_new_each_epoch(replicas):
    def replica(peer):
        return lists(DistributedDataset(Dataset.range(24).shuffle().batch(12), peer), epochs=2)

    found = replicas(3, replica)
    epochs = [sorted(flat(flat(mine[e]) for mine in found)) for e in range(2)]
    assert epochs == [list(range(24))] * 2
    assert found[0][0] != found[0][1]


def test_order_does_not_depend_on_the_number_of_replicas(replicas):
    orders = []
    for size in (1, 2, 3, 4):
        found = replicas(size, lambda p: lists(DistributedDataset(Dataset.range(24).shuffle(seed=4).batch(12), p))[0])
        orders.append([flat(mine[k] for mine in found) for k in range(2)])
    assert all(order == orders[0] for order in orders)


def test_only_the_own_rows_are_read(replicas):
    class Counting(Source):
        def __init__(self):
            self.seen = []

        def __len__(self):
            return 30

        def element_spec(self):
            return ArraySpec((), "int64")

        def read(self, rows):
            self.seen += rows.tolist()
            return rows.copy()

        def file_rows(self):
            return ()

        def of_files(self, which):
            raise AssertionError

        def agree(self, peers):
            pass

        def fingerprint(self):
            return "counting"

    def replica(peer):
        source = Counting()
        distributed = DistributedDataset(Dataset(source).shuffle(seed=1).batch(8), peer)
        got = flat(lists(distributed)[0])
        assert source.seen == got
        return got

    assert sorted(flat(replicas(4, replica))) == list(range(30))


def test_map_after_batch_sees_the_piece_and_the_empty_one(replicas):
    def replica(peer):
        seen = []
        dataset = Dataset.from_arrays(np.ones((5, 2), "f4")).batch(4)
        mapped = dataset.map(lambda x: (seen.append(len(x)) or x * 2, x.sum(axis=1)))
        last = list(DistributedDataset(mapped, peer))[-1]
        return seen, [(x.shape, x.dtype.name) for x in last]

    # After its first piece, a replica calls the function for as many copies of the first row: they give the dtypes.
    assert replicas(3, replica) == [
        ([2, 2, 1], [((1, 2), "float32"), ((1,), "float32")]),
        ([1, 1, 0], [((0, 2), "float32"), ((0,), "float32")]),
        ([1, 1, 0], [((0, 2), "float32"), ((0,), "float32")]),
    ]


def test_map_before_batch_leaves_an_empty_piece_of_the_right_kind(replicas):
    def replica(peer):
        dataset = Dataset.range(1).map(lambda i: {"x": np.full((3,), i, "f4")}).batch(4)
        (batch,) = DistributedDataset(dataset, peer)
        return batch["x"].shape, batch["x"].dtype.name

    assert replicas(3, replica) == [((1, 3), "float32"), ((0, 3), "float32"), ((0, 3), "float32")]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes came with Python 3.11")
def test_map_that_cannot_take_an_empty_piece(replica_errors):
    dataset = Dataset.range(1).batch(2).map(lambda x: x.max())
    first, second = replica_errors(2, lambda p: list(DistributedDataset(dataset, p)))
    assert first == [0]
    assert isinstance(second, ValueError)
    assert "must accept arrays of length 0" in second.__notes__[0]


def test_off_shows_everything_in_small_batches(replicas):
    dataset = with_policy(Dataset.range(8).batch(4), "OFF")
    assert replicas(2, lambda p: lists(DistributedDataset(dataset, p))[0]) == [[[0, 1], [2, 3], [4, 5], [6, 7]]] * 2


def test_hint_replaces_the_marked_shard_only(replicas):
    plain = with_policy(Dataset.range(6).batch(2), "HINT")
    assert replicas(2, lambda p: flat(lists(DistributedDataset(plain, p))[0])) == [list(range(6))] * 2
    marked = with_policy(Dataset.range(5).shard(SHARD_HINT, SHARD_HINT).batch(2), "HINT")
    assert replicas(2, lambda p: lists(DistributedDataset(marked, p))[0]) == [[[0], [2], [4], []], [[1], [3], [], []]]


@pytest.mark.parametrize("name", ["AUTO", "DATA", "OFF"])
def test_a_hint_without_the_policy_is_an_error(replica_errors, name):
    dataset = Dataset.range(5).shard(SHARD_HINT, SHARD_HINT).batch(2)
    errors = replica_errors(2, lambda p: DistributedDataset(with_policy(dataset, name), p))
    assert [type(e) for e in errors] == [ValueError] * 2
    assert "AutoShardPolicy.HINT" in str(errors[0])
    with pytest.raises(ValueError, match="SHARD_HINT"):
        list(dataset)


def test_file_policy_needs_files(replica_errors):
    errors = replica_errors(2, lambda p: DistributedDataset(with_policy(Dataset.range(5).batch(2), "FILE"), p))
    assert [type(e) for e in errors] == [ValueError] * 2
    assert "needs a dataset of files" in str(errors[1])


def test_unbatched_and_foreign_datasets(replica_errors):
    for error in replica_errors(2, lambda p: DistributedDataset(Dataset.range(5), p)):
        assert isinstance(error, ValueError)
        assert ".batch(global_batch_size) first" in str(error)
    for error in replica_errors(2, lambda p: DistributedDataset([1, 2], p)):
        assert isinstance(error, TypeError)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda r: Dataset.range(5 + r).batch(2), "source is range(0, 6) on rank 1 and range(0, 5) on rank 0"),
        (lambda r: Dataset.range(5).batch(2 + r), "Batch(size=3"),
        (lambda r: Dataset.range(5).shuffle(seed=r).batch(2), "seed=1"),
        (lambda r: Dataset.range(5).batch(2).repeat(1 + r), "Repeat(count=2)"),
    ],
)
def test_replicas_that_disagree_all_hear_of_it(replica_errors, make, text):
    for error in replica_errors(2, lambda p: DistributedDataset(make(p.rank), p)):
        assert isinstance(error, ValueError)
        assert text in str(error)


def test_iterating_communicates_nothing(replicas):
    def replica(peer):
        distributed = DistributedDataset(Dataset.range(9).shuffle().batch(3), peer)
        before = peer.gathers
        lists(distributed, epochs=3)
        return peer.gathers - before

    assert replicas(2, replica) == [0, 0]


def test_iterator(replicas):
    def replica(peer):
        distributed = DistributedDataset(Dataset.range(4).batch(2), peer)
        iterator = iter(distributed)
        assert iter(iterator) is iterator
        assert iterator.element_spec == distributed.element_spec == ArraySpec((None,), "int64")
        first = iterator.get_next()
        second = iterator.get_next_as_optional()
        assert second.has_value()
        assert second.get_value() is second.get_value()
        third = iterator.get_next_as_optional()
        assert not third.has_value()
        with pytest.raises(ValueError, match="empty"):
            third.get_value()
        for _ in range(2):
            with pytest.raises(StopIteration):
                iterator.get_next()
        return first.tolist(), second.get_value().tolist()

    assert replicas(2, replica) == [([0], [2]), ([1], [3])]


def test_iterators_refuse_replica_functions(replicas):
    def replica(peer):
        iterator = iter(DistributedDataset(Dataset.range(4).batch(2), peer))
        stack = context.stack()
        stack.append(context.Mode(object(), replica_context=object()))
        with pytest.raises(ValueError, match="outside of replica_fn"):
            next(iterator)
        stack[:] = [context.Mode(object())]
        first = next(iterator).tolist()
        stack.clear()
        return first

    assert replicas(1, replica) == [[0, 1]]


def test_element_spec_and_reduce(replicas):
    def replica(peer):
        dataset = Dataset.from_arrays(np.zeros((6, 2))).batch(4, drop_remainder=True)
        distributed = DistributedDataset(dataset, peer)
        assert not hasattr(distributed, "map")
        assert not hasattr(distributed, "batch")
        return distributed.element_spec, distributed.reduce(0, lambda n, batch: n + len(batch))

    assert replicas(1, replica) == [(ArraySpec((4, 2), "f8"), 4)]
    assert replicas(2, replica) == [(ArraySpec((None, 2), "f8"), 2)] * 2


def test_endless(replicas):
    def replica(peer):
        distributed = DistributedDataset(Dataset.range(3).repeat().batch(2), peer)
        assert distributed.cardinality == -1
        assert distributed
        assert repr(distributed) == ("<DistributedDataset of=<Dataset: range(0, 3), repeat(), batch(2)> steps=endless>")
        with pytest.raises(TypeError, match="has no len"):
            len(distributed)
        iterator = iter(distributed)
        return [next(iterator).tolist() for _ in range(4)]

    assert replicas(2, replica) == [[[0], [2], [1], [0]], [[1], [0], [2], [1]]]


@pytest.mark.parametrize("made", [DistributedDataset, DistributedDatasetsFromFunction])
def test_input_options_are_checked(replica_errors, made):
    dataset = Dataset.range(4).batch(2)
    what = dataset if made is DistributedDataset else (lambda ctx: dataset)
    per_replica = InputReplicationMode.PER_REPLICA

    def error(options):
        (result,) = replica_errors(1, lambda p: made(what, p, options))
        return type(result)

    assert error(InputOptions()) is made
    assert error(InputOptions(experimental_place_dataset_on_device=True)) is ValueError
    assert error(InputOptions(True, per_replica, True)) is ValueError
    assert error("x") is TypeError
    expected = NotImplementedError if made is DistributedDataset else made
    assert error(InputOptions(False, per_replica)) is expected


# --- from a function ----------------------------------------------------------------------


def test_function_is_told_its_place(replicas):
    def replica(peer):
        def dataset_fn(ctx):
            size = ctx.get_per_replica_batch_size(6)
            return Dataset.range(9).shard(ctx.num_input_pipelines, ctx.input_pipeline_id).batch(size)

        distributed = DistributedDatasetsFromFunction(dataset_fn, peer)
        assert distributed.element_spec == ArraySpec((None,), "int64")
        return lists(distributed)[0]

    assert replicas(3, replica) == [[[0, 3], [6]], [[1, 4], [7]], [[2, 5], [8]]]


def test_short_replicas_get_empty_batches(replicas):
    def replica(peer):
        made = DistributedDatasetsFromFunction(lambda ctx: Dataset.range(2 * ctx.input_pipeline_id).batch(2), peer)
        assert made.cardinality == len(made) == 2
        assert repr(made) == "<DistributedDataset of=<lambda> steps=2>"
        assert "&lt;lambda&gt;" in made._repr_html_()
        return lists(made)[0]

    assert replicas(3, replica) == [[[], []], [[0, 1], []], [[0, 1], [2, 3]]]


def test_unseeded_shuffle_before_shard_loses_no_row(replicas):
    def replica(peer):
        def dataset_fn(ctx):
            return Dataset.range(30).shuffle().shard(ctx.num_input_pipelines, ctx.input_pipeline_id).batch(4)

        return flat(lists(DistributedDatasetsFromFunction(dataset_fn, peer))[0])

    assert sorted(flat(replicas(3, replica))) == list(range(30))


def test_error_of_one_function_reaches_all(replica_errors):
    def replica(peer):
        def dataset_fn(ctx):
            if ctx.input_pipeline_id == 1:
                raise KeyError("no such file")
            return Dataset.range(3).batch(1)

        return DistributedDatasetsFromFunction(dataset_fn, peer)

    errors = replica_errors(3, replica)
    assert [type(e) for e in errors] == [RuntimeError, KeyError, RuntimeError]
    assert "rank 1" in str(errors[0])
    assert "no such file" in str(errors[0])


def test_result_that_is_no_dataset(replica_errors):
    def replica(peer):
        result = Dataset.range(3).batch(1) if peer.rank == 0 else [1, 2]
        return DistributedDatasetsFromFunction(lambda ctx: result, peer)

    for error in replica_errors(2, replica):
        assert isinstance(error, TypeError)
        assert "on rank 1 it returned list" in str(error)


def test_single_rows_from_a_function(replicas, replica_errors):
    made = replicas(2, lambda p: DistributedDatasetsFromFunction(lambda ctx: Dataset.range(3), p))
    assert [lists(each)[0] for each in made] == [[0, 1, 2]] * 2
    assert made[0].element_spec == ArraySpec((), "int64")
    for error in replica_errors(2, lambda p: DistributedDatasetsFromFunction(lambda ctx: Dataset.range(3 + p.rank), p)):
        assert isinstance(error, ValueError)
        assert "[3, 4]" in str(error)
