"""Tests of datasets of sequences, arrays of other libraries, and iterables."""

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.data import (
    SHARD_HINT,
    UNKNOWN_CARDINALITY,
    ArraySpec,
    AutoShardPolicy,
    Dataset,
    DistributedDataset,
    DistributedDatasetsFromFunction,
    Options,
)

fast = settings(derandomize=True, database=None, deadline=None, max_examples=40)


def with_policy(dataset, name):
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy[name]
    return dataset.with_options(options)


def lists(batches):
    return [np.asarray(batch).tolist() for batch in batches]


# --- sequences ----------------------------------------------------------------------------


class Torch:
    """Stand-in for a map-style dataset of torch."""

    def __init__(self, n=7):
        self.n, self.asked = n, []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        assert type(i) is int
        self.asked.append(i)
        return {"x": [i, i + 0.5], "y": i}


class Batched(Torch):
    def __getitems__(self, numbers):
        self.asked.append(numbers)
        return [{"x": [i, i + 0.5], "y": i} for i in numbers]


@pytest.mark.parametrize("kind", [Torch, Batched])
def test_map_style_datasets(kind):
    sequence = kind()
    dataset = Dataset.from_sequence(sequence)
    assert dataset.element_spec == {"x": ArraySpec((2,), "f8"), "y": ArraySpec((), "i8")}
    sequence.asked.clear()
    first, second = dataset.shard(2, 1).batch(2)
    assert (first["y"].tolist(), second["x"].tolist()) == ([1, 3], [[5, 5.5]])
    assert sequence.asked == ([1, 3, 5] if kind is Torch else [[1, 3], [5]])


class Zarr:
    """Stand-in for an array of zarr: shape, dtype and an orthogonal index. It records the indices that are read."""

    def __init__(self, values):
        self.values, self.asked = values, []
        self.shape, self.dtype = values.shape, values.dtype

    def __len__(self):
        return len(self.values)

    def __getitem__(self, where):
        self.asked.append(where)
        return self.values[where]

    @property
    def oindex(self):
        return self


def test_arrays_of_other_libraries(tmp_path):
    values = np.arange(40, dtype=">i4").reshape(20, 2)
    rows = np.array([7, 3, 4, 7, 19])
    array = Zarr(values)
    source = Dataset.from_sequence(array).definition.source
    assert source.read(rows).tolist() == values[rows].tolist()
    assert array.asked.pop().tolist() == [3, 4, 7, 19]
    assert source.read(np.arange(3, 6)).tolist() == values[3:6].tolist()
    assert array.asked == [slice(3, 6)]
    assert source.element_spec() == ArraySpec((2,), "i4")
    memory = np.memmap(tmp_path / "m.bin", "i4", "w+", shape=(20, 2))
    memory[:] = values
    with h5py.File(tmp_path / "h.h5", "w") as file:
        file["x"] = values
        for other in (memory, file["x"], values):
            source = Dataset.from_sequence(other).definition.source
            found = source.read(rows)
            assert found.tolist() == values[rows].tolist()
            assert (type(found), found.dtype.isnative) == (np.ndarray, True)
            found[:] = 0
            assert source.read(rows).tolist() == values[rows].tolist()
            assert source.read(rows[:0]).shape == (0, 2)


def test_sequences_are_shared(replicas):
    def replica(peer):
        return lists(DistributedDataset(Dataset.from_sequence(list(range(5))).batch(4), peer))

    assert replicas(3, replica) == [[[0, 1], [4]], [[2], []], [[3], []]]


def test_what_is_no_sequence():
    with pytest.raises(TypeError, match=r"has no __getitem__: use from_iterable\(\)"):
        Dataset.from_sequence({1, 2})
    with pytest.raises(TypeError, match="has no __len__"):
        Dataset.from_sequence(iter([1]))
    with pytest.raises(ValueError, match="this list is empty"):
        Dataset.from_sequence([])
    with pytest.raises(ValueError, match="elements of one batch must have equal shapes"):
        list(Dataset.from_sequence([[1], [1, 2]]).batch(2))


# --- iterables ----------------------------------------------------------------------------

OPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(-1, 9)),
        st.tuples(st.just("skip"), st.integers(0, 4)),
        st.tuples(st.just("shard"), st.just(2), st.integers(0, 1)),
        st.tuples(st.just("repeat"), st.integers(0, 2)),
        st.tuples(st.just("map"), st.just(lambda x: x + 100)),
    ),
    max_size=4,
)


def chain(dataset, ops):
    for name, *arguments in ops:
        dataset = getattr(dataset, name)(*arguments)
    return dataset


@fast
@given(n=st.integers(1, 12), before=OPS, batch=st.integers(1, 5), drop=st.booleans(), after=OPS)
def test_iterables_come_as_rows_do(n, before, batch, drop, after):
    ops = [*before, ("batch", batch, drop), *after]
    for part in (ops, before):
        expected = lists(chain(Dataset.range(n), part))
        assert lists(chain(Dataset.from_iterable(range(n)), part)) == expected


@fast
@given(
    n=st.integers(0, 20),
    size=st.integers(1, 4),
    batch=st.integers(1, 9),
    drop=st.booleans(),
    buffer=st.none() | st.integers(1, 8),
    policy=st.sampled_from(["AUTO", "DATA", "OFF"]),
)
def test_iterables_are_shared_as_rows_are(replicas, n, size, batch, drop, buffer, policy):
    def replica(peer):
        dataset = Dataset.from_iterable(lambda: iter(range(n)))
        if buffer is not None:
            dataset = dataset.shuffle(buffer, seed=1)
        distributed = DistributedDataset(with_policy(dataset.batch(batch, drop), policy), peer)
        assert distributed.cardinality == UNKNOWN_CARDINALITY
        return [lists(distributed) for epoch in range(2)]

    def rows(peer):
        return lists(DistributedDataset(with_policy(Dataset.range(n).batch(batch, drop), policy), peer))

    found, expected = replicas(size, replica), replicas(size, rows)
    for epoch in range(2):
        mine = [each[epoch] for each in found]
        assert [[len(batch) for batch in each] for each in mine] == [
            [len(batch) for batch in each] for each in expected
        ]
        if buffer is None:
            assert mine == expected
        elif policy != "OFF" and not drop:
            assert sorted(row for each in mine for batch in each for row in batch) == list(range(n))


def test_hint_and_file(replicas, replica_errors):
    marked = with_policy(Dataset.from_iterable(range(5)).shard(SHARD_HINT, SHARD_HINT).batch(2), "HINT")
    assert replicas(2, lambda p: lists(DistributedDataset(marked, p))) == [[[0], [2], [4], []], [[1], [3], [], []]]
    for error in replica_errors(
        2, lambda p: DistributedDataset(with_policy(Dataset.from_iterable(range(5)).batch(2), "FILE"), p)
    ):
        assert isinstance(error, ValueError)
        assert "needs a dataset of files" in str(error)


def test_one_flag_a_step(replicas):
    def replica(peer):
        distributed = DistributedDataset(Dataset.from_iterable(range(9)).batch(3), peer)
        iterator = iter(distributed)
        before, steps = peer.gathers, len(list(iterator))
        with pytest.raises(StopIteration):
            next(iterator)
        return steps, peer.gathers - before

    assert replicas(2, replica) == [(3, 4)] * 2


def test_iterables_of_different_lengths_end_together(replicas):
    def replica(peer):
        made = DistributedDatasetsFromFunction(
            lambda ctx: Dataset.from_iterable(lambda: ({"x": [i, i]} for i in range(3 * ctx.input_pipeline_id))).batch(
                2
            ),
            peer,
        )
        return [[batch["x"].shape for batch in made] for _ in range(2)]

    expected = [[(0, 2)] * 3, [(2, 2), (1, 2), (0, 2)], [(2, 2)] * 3]
    assert replicas(3, replica) == [[each, each] for each in expected]


def test_rows_and_iterables_end_together(replicas, replica_errors):
    def replica(peer):
        def dataset_fn(ctx):
            return (Dataset.range(5) if ctx.input_pipeline_id else Dataset.from_iterable(range(2))).batch(2)

        return lists(DistributedDatasetsFromFunction(dataset_fn, peer))

    assert replicas(2, replica) == [[[0, 1], [], []], [[0, 1], [2, 3], [4]]]
    for error in replica_errors(
        2, lambda p: DistributedDatasetsFromFunction(lambda ctx: Dataset.from_iterable([1]), p)
    ):
        assert isinstance(error, ValueError)
        assert "unknown length must be batched" in str(error)


def test_generators_can_be_gone_through_once():
    dataset = Dataset.from_iterable(i for i in range(3)).batch(2)
    assert dataset.element_spec == ArraySpec((None,), "i8")
    assert lists(dataset) == [[0, 1], [2]]
    with pytest.raises(ValueError, match="yields its elements only once: give from_iterable"):
        list(dataset)


def test_questions_about_iterables():
    dataset = Dataset.from_iterable(range(3))
    assert dataset.cardinality() == UNKNOWN_CARDINALITY == -2
    assert dataset.element_spec == ArraySpec((), "i8")
    with pytest.raises(TypeError, match=r"length .* is unknown before its end"):
        len(dataset)
    with pytest.raises(TypeError, match="needs an iterable"):
        Dataset.from_iterable(3)
    with pytest.raises(ValueError, match="buffer_size"):
        list(dataset.shuffle(seed=1))
    with pytest.raises(ValueError, match="yields no elements"):
        Dataset.from_iterable([]).element_spec  # noqa: B018
    assert sorted(int(x) for x in dataset.repeat().shuffle(3, seed=1).take(6)) == [0, 0, 1, 1, 2, 2]


def test_iterables_go_on(replicas):
    def replica(peer):
        def made(batch):
            return DistributedDataset(Dataset.from_iterable(range(10)).shuffle(4, seed=3).batch(batch), peer)

        first = iter(made(4))
        before = [next(first).tolist()]
        second = made(3)
        second.restore(first.state())
        return before + lists(second)

    (order,) = replicas(1, lambda p: lists(DistributedDataset(
        Dataset.from_iterable(range(10)).shuffle(4, seed=3).batch(10), p)))  # fmt: skip
    first, second = replicas(2, replica)
    assert [a + b for a, b in zip(first, second, strict=True)] == [order[0][:4], order[0][4:7], order[0][7:]]
